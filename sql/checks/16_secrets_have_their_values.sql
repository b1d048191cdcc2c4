-- A secret that is there has its current value, a deleted one has none left, and no provider uses a deleted one.
select s.id, 'the current version is missing' as fault
from secrets s
where s.deleted_at is null
  and not exists (select from secret_versions v where v.secret_id = s.id and v.version = s.current_version)
union all
select s.id, 'a deleted secret has values or grants'
from secrets s
where s.deleted_at is not null
  and (exists (select from secret_versions v where v.secret_id = s.id)
       or exists (select from secret_grants g where g.secret_id = s.id))
union all
select s.id, 'a provider uses a deleted secret'
from secrets s join model_provider_configs p on p.secret_id = s.id and p.deleted_at is null
where s.deleted_at is not null;
