-- Purpose: when a pod that our finalizer holds may go (I5).

-- Purpose: whether the evidence of a pod is used up. Asked before the transaction commits, acted on after it.
-- Returns: true once it was settled, or found duplicate or stale; for a pod of nobody, once it was deleted long enough
--   ago by the database's clock. A pod that has not ended is kept while its end may still tell something: until it is
--   deleted and what it said by its silence is settled.
-- Tables written: none. Clock: settle.clock().
create or replace function settle.may_go(p_disposition text, p_pod settle.matched_pod)
returns boolean
language sql
volatile
set search_path = pg_catalog, pg_temp
as $$
    select case p_disposition
        when 'stale' then true
        when 'settled' then true
        when 'overrode' then true
        when 'confirmed' then true
        when 'duplicate' then ((p_pod).verdict).final or (p_pod).facts ->> 'deletion_at' is not null
        else coalesce(p_disposition is null and (p_pod).facts ->> 'deletion_at' is not null and exists (
            select
            from settle.stranger as s
            where s.uid = (p_pod).facts ->> 'uid'
                and s.first_seen_at + settle.setting_value('unmatched_after')::interval <= settle.clock()), false)
    end
$$;
comment on function settle.may_go(text, settle.matched_pod) is 'Whether a held pod may go.';

-- Purpose: keeps since when a deleted pod of no known task is seen.
-- Tables written: settle.stranger. Locks: its rows, in id order. Clock: settle.clock().
create or replace function settle.note_strangers(p_page settle.matched_pod[])
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := settle.clock();
begin
    insert into settle.stranger as s (uid, namespace, pod, first_seen_at, last_seen_at)
    select distinct on (m.facts ->> 'uid') m.facts ->> 'uid', coalesce(m.namespace, ''), coalesce(m.pod, ''), v_now, v_now
    from unnest(p_page) as m
    where m.problem is not null
        and m.facts ->> 'uid' is not null
        and m.facts ->> 'deletion_at' is not null
    order by m.facts ->> 'uid'
    on conflict on constraint stranger_pkey do update
    set last_seen_at = greatest(s.last_seen_at, excluded.last_seen_at);
end
$$;
comment on function settle.note_strangers(settle.matched_pod[]) is 'Keeps since when a deleted pod of nobody is seen.';
