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
-- Files of an input or result that is written in the same transaction, or, with $10, by a later one.
insert into artifacts (agent_id, id, org_id, digest, size, media_type, filename, width, height, loose)
select $1, f.id, $2, f.digest, f.size, f.media_type, f.filename, f.width, f.height, $10
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

-- name: agents_with_loose_files
-- Agents with files, older than $1 seconds, of which it is open whether anything refers to them. Index: artifacts_loose.
select distinct agent_id from (
  select agent_id from artifacts where loose and created_at < statement_timestamp() - make_interval(secs => $1)
  order by created_at limit 1000
) oldest limit 100;

-- name: loose_files
-- Those of one agent. Index: artifacts_pkey.
select id from artifacts where agent_id = $1 and loose and created_at < statement_timestamp() - make_interval(secs => $2);

-- name: settle_files
-- Files ($2) are referred to for good when the log mentions their names ($3); it is append-only, so no lock is needed.
-- One pass over the agent's log, whatever the number of files. Index: events_pkey, artifacts_pkey.
update artifacts a set loose = false
from unnest($2::uuid[], $3::text[]) f (id, name)
where a.agent_id = $1 and a.id = f.id
  and f.name in (
    select m[1] from events e, regexp_matches(e.payload::text, 'art_[a-z2-7]{26}', 'g') m
    where e.agent_id = $1 and strpos(e.payload::text, 'art_') > 0)
returning a.id;

-- name: lock_contents
-- Lock the contents of files, so that nobody comes to refer to them meanwhile. Index: artifacts_pkey, artifact_blobs_pkey.
select b.org_id, b.digest from artifact_blobs b
where (b.org_id, b.digest) in (select org_id, digest from artifacts where agent_id = $1 and id = any($2::uuid[]))
order by b.digest for no key update;

-- name: remove_loose_files
-- Remove files ($2, names $3) of an agent, older than $4 seconds, that neither its log nor its inputs mention. None while
-- a call runs: its worker may be cut off and still bring the result. A content that was touched lately waits for those
-- who did. The hot row and the contents are locked. Index: events_pkey, artifacts_pkey, artifacts_content.
with mentioned as materialized (
  select m[1] as name from events e, regexp_matches(e.payload::text, 'art_[a-z2-7]{26}', 'g') m
  where e.agent_id = $1 and strpos(e.payload::text, 'art_') > 0
  union
  select m[1] from inputs n, regexp_matches(n.content::text, 'art_[a-z2-7]{26}', 'g') m
  where n.agent_id = $1 and strpos(n.content::text, 'art_') > 0
), doomed as materialized (
  select a.agent_id, a.id, a.org_id, a.digest
  from unnest($2::uuid[], $3::text[]) f (id, name)
  join artifacts a on a.agent_id = $1 and a.id = f.id
  join artifact_blobs b on b.org_id = a.org_id and b.digest = a.digest
  where a.loose and f.name not in (select name from mentioned)
    and a.created_at < statement_timestamp() - make_interval(secs => $4)
    and b.touched_at < statement_timestamp() - make_interval(secs => $4)
    and not exists (select from tool_calls t where t.agent_id = $1 and t.state = 'running')
), gone as (
  delete from artifacts a using doomed d where a.agent_id = d.agent_id and a.id = d.id returning a.id
), freed as (
  update artifact_blobs b set referenced = false, touched_at = statement_timestamp()
  from (select distinct org_id, digest from doomed) d
  where b.org_id = d.org_id and b.digest = d.digest
    and not exists (select from artifacts a where a.org_id = d.org_id and a.digest = d.digest
                     and not exists (select from doomed x where x.agent_id = a.agent_id and x.id = a.id))
  returning b.digest
)
select (select count(*) from gone) as files, (select count(*) from freed) as contents;

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
