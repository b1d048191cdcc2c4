-- name: touch_blob
-- Whether a content is there already; its removal is put off by that. Index: artifact_blobs_pkey.
update artifact_blobs set touched_at = statement_timestamp() where org_id = $1 and digest = $2 returning digest;

-- name: insert_blob
-- Announce a content whose chunks follow in the same transaction. No row when somebody was faster; a transaction that
-- is still writing the same content is waited for. Index: artifact_blobs_pkey.
insert into artifact_blobs (org_id, digest, size, chunk_bytes, place) values ($1, $2, $3, $4, $5)
on conflict (org_id, digest) do nothing returning digest;

-- name: insert_chunk
-- One piece of a content.
insert into artifact_chunks (org_id, digest, ordinal, data) values ($1, $2, $3, $4);

-- name: refer_to_blobs
-- Keep contents for good: an artifact refers to them from now on. Index: artifact_blobs_pkey.
update artifact_blobs b set referenced = true from (
  select org_id, digest from artifact_blobs where org_id = $1 and digest = any($2::bytea[]) and not referenced
  order by digest for no key update
) locked
where b.org_id = locked.org_id and b.digest = locked.digest;

-- name: insert_artifacts
-- Files of an input or result that is written in the same transaction.
insert into artifacts (agent_id, id, org_id, digest, size, media_type, filename, width, height)
select $1, f.id, $2, f.digest, f.size, f.media_type, f.filename, f.width, f.height
from unnest($3::uuid[], $4::bytea[], $5::bigint[], $6::text[], $7::text[], $8::integer[], $9::integer[])
  as f (id, digest, size, media_type, filename, width, height);

-- name: find_artifacts
-- What is known of files of an agent. Index: artifacts_pkey.
select a.agent_id, a.id, a.org_id, a.digest, a.size, a.media_type, a.filename, a.width, a.height, a.created_at,
       b.chunk_bytes, b.place
from artifacts a join artifact_blobs b on b.org_id = a.org_id and b.digest = a.digest
where a.agent_id = $1 and a.id = any($2::uuid[]);

-- name: newest_texts
-- The newest text files of an agent; their ids grow with time. Index: artifacts_pkey.
select a.agent_id, a.id, a.org_id, a.digest, a.size, a.media_type, a.filename, a.width, a.height, a.created_at,
       b.chunk_bytes, b.place
from artifacts a join artifact_blobs b on b.org_id = a.org_id and b.digest = a.digest
where a.agent_id = $1 and a.media_type like 'text/%' order by a.id desc limit $2;

-- name: read_chunks
-- Pieces of a content, in order. Index: artifact_chunks_pkey.
select data from artifact_chunks where org_id = $1 and digest = $2 and ordinal between $3 and $4 order by ordinal;

-- name: remove_unreferenced
-- Remove contents that nothing came to refer to within $1 seconds: uploads that were cut off or refused. The chunks go
-- with them. Index: artifact_blobs_unreferenced.
delete from artifact_blobs b using (
  select org_id, digest from artifact_blobs
  where not referenced and touched_at < statement_timestamp() - make_interval(secs => $1)
  order by touched_at limit 100 for update skip locked
) old
where b.org_id = old.org_id and b.digest = old.digest
returning b.org_id, b.digest, b.place;
