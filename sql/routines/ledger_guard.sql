-- Purpose: keeps the ledger append-only, for the owner as well.
-- Raises: ST005.
create or replace function settle.refuse_change()
returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception 'settle.settlement is append-only: % refused', lower(tg_op)
        using errcode = 'ST005', hint = 'A wrong settlement is answered by a new one: settle.clear(task instance).';
end
$$;
comment on function settle.refuse_change() is 'Trigger: refuses every change of a ledger row (ST005).';

create or replace trigger settlement_append_only
before update or delete or truncate on settle.settlement
for each statement execute function settle.refuse_change();
