-- Every content that an agent's file refers to is there to its last byte, and is not up for removal.
select encode(b.digest, 'hex') as digest, b.size, b.referenced, coalesce(c.bytes, 0) as bytes
from artifact_blobs b
left join lateral (
  select sum(octet_length(data)) as bytes, count(*) as pieces from artifact_chunks where org_id = b.org_id and digest = b.digest
) c on true
where (b.place = 'postgres' and coalesce(c.bytes, 0) <> b.size)
   or (not b.referenced and exists (select from artifacts a where a.org_id = b.org_id and a.digest = b.digest));
