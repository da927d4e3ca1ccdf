-- Purpose: delivery of events to listeners, at least once, in order for each task instance and listener.
--   A deliverer calls claim_events, then events_delivered or event_failed for each event. It may be killed at any
--   point: its claim expires and the event is delivered again. All of them lock outbox rows only, in id order or
--   skipping locked ones, so no one waits for another in a circle. Clock: settle.clock().

-- Purpose: what a listener is told, from the ledger alone: no evidence, so no pod arguments and nothing secret.
-- Arguments: p_settlement a ledger row; p_id the outbox id, the key to deduplicate by.
-- Returns: one object; docs/task-instance-event.schema.json describes it. Tables written: none.
create or replace function settle.event_payload(p_settlement settle.settlement, p_id bigint)
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
as $$
    select jsonb_build_object(
        'id', p_id,
        'event', case (p_settlement).verdict
            when 'failed' then case (p_settlement).state when 'up_for_retry' then 'retry' else 'failed' end
            when 'clear' then 'cleared'
            else (p_settlement).verdict end,
        'settlement_id', (p_settlement).id,
        'settled_at', (p_settlement).settled_at,
        'disposition', (p_settlement).disposition,
        'previous_state', (p_settlement).previous_state,
        'state', (p_settlement).state,
        'task_instance', jsonb_build_object(
            'id', (p_settlement).task_instance_id,
            'dag_id', (p_settlement).dag_id,
            'run_id', (p_settlement).run_id,
            'task_id', (p_settlement).task_id,
            'map_index', (p_settlement).map_index,
            'try_number', (p_settlement).try_number,
            'max_tries', (p_settlement).max_tries,
            'operator', (
                select t.operator
                from settle.task_instance as t
                where t.id = (p_settlement).task_instance_id)),
        'failure_kind', (p_settlement).failure_kind,
        'reason', (p_settlement).reason,
        'exit_code', (p_settlement).exit_code,
        'refund', jsonb_build_object(
            'given', (p_settlement).refund = 1,
            'taken_back', (p_settlement).refund = -1,
            'n', (p_settlement).refunds_used,
            'cap', (p_settlement).refund_cap),
        'why', (p_settlement).why,
        'next_try_at', (p_settlement).next_try_at,
        'provisional', (p_settlement).provisional,
        'source', (p_settlement).source,
        'namespace', (p_settlement).namespace,
        'pod', (p_settlement).pod,
        'node', (p_settlement).node)
$$;
comment on function settle.event_payload(settle.settlement, bigint) is 'What a listener is told of a ledger row.';

-- Purpose: registers listeners that are not known yet. One that was unregistered stays so.
-- Returns: those of the names that are told. Raises: ST002. Tables written: settle.listener.
create or replace function settle.ensure_listeners(p_names text[])
returns setof text
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform settle.register_listener(n.name)
    from (select distinct u.name from unnest(p_names) as u (name) order by u.name) as n
    where not exists (select from settle.listener as l where l.name = n.name);
    return query
    select l.name from settle.listener as l where l.name = any(p_names) and l.enabled order by l.name;
end
$$;
comment on function settle.ensure_listeners(text[]) is 'Registers listeners that are not known yet.';

-- Purpose: takes events in hand for one listener. An event waits for an earlier one of its task instance that is
--   still open. Fresh events come in a batch; one that was tried before comes alone, so that whatever kills its
--   deliverer costs no other event a try.
-- Arguments: p_claim a fresh UUID of the caller; p_limit how many at most.
-- Returns: the events, in id order; none while nothing is due or the listener is off.
-- Tables written: settle.outbox. Locks: its rows, those that others hold are skipped. Clock: settle.clock().
create or replace function settle.claim_events(p_listener text, p_claim uuid, p_limit integer)
returns setof settle.claimed_event
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
    v_now timestamptz := settle.clock();
    v_most integer := greatest(settle.setting_value('outbox_tries')::integer, 1);
begin
    if p_claim is null or p_limit is null or p_limit < 1 then
        raise exception 'a claim needs a UUID and a limit of 1 or more, not % and %',
            coalesce(p_claim::text, 'null'), coalesce(p_limit::text, 'null')
            using errcode = 'ST002', hint = 'gen_random_uuid() makes one.';
    end if;
    perform from settle.listener as n where n.name = p_listener and n.enabled;
    if not found then
        return;
    end if;
    -- What is due with all its tries begun is an expired claim: its deliverer died each time, or just now.
    update settle.outbox as o
    set claim = null, set_aside_at = v_now,
        last_error = coalesce(o.last_error, 'its deliverer ended without a word')
    where o.id in (
        select l.id
        from settle.outbox as l
        where l.listener = p_listener
            and l.delivered_at is null and l.set_aside_at is null
            and l.tries >= v_most and l.due_at <= v_now
        order by l.id
        for update skip locked);
    return query
    with due as materialized (
        select o.id, o.tries
        from settle.outbox as o
        where o.listener = p_listener
            and o.delivered_at is null and o.set_aside_at is null
            and (o.due_at is null or o.due_at <= v_now)
            and not exists (
                select
                from settle.outbox as e
                where e.listener = o.listener
                    and e.task_key = o.task_key
                    and e.id < o.id
                    and e.delivered_at is null and e.set_aside_at is null)
        order by o.tries, o.id
        limit p_limit
        for update of o skip locked
    ),
    chosen as (
        select d.id, d.tries, row_number() over (order by d.tries, d.id) as place
        from due as d
    ),
    claimed as (
        update settle.outbox as o
        set claim = p_claim,
            tries = o.tries + 1,
            due_at = v_now + settle.setting_value('outbox_claim')::interval
        from chosen as c
        where o.id = c.id and (c.tries = 0 or c.place = 1)
        returning o.id, o.tries, o.settlement_id
    )
    select c.id, c.tries, settle.event_payload(s, c.id)
    from claimed as c
    inner join settle.settlement as s on c.settlement_id = s.id
    order by c.id;
end
$$;
comment on function settle.claim_events(text, uuid, integer) is 'Takes events of a listener in hand.';

-- Purpose: says that events were delivered, and keeps the rest of the claim for as long again.
-- Returns: how many of them were still in this claim; the others were delivered, or will be, by whoever has them now.
-- Tables written: settle.outbox. Locks: the rows of the claim, in id order. Clock: settle.clock().
create or replace function settle.events_delivered(p_claim uuid, p_ids bigint[])
returns integer
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := settle.clock();
    v_done integer;
begin
    perform from settle.outbox as o where o.claim = p_claim order by o.id for update;
    update settle.outbox as o
    set delivered_at = v_now, claim = null, last_error = null
    where o.claim = p_claim and o.id = any(p_ids);
    get diagnostics v_done = row_count;
    update settle.outbox as o
    set due_at = v_now + settle.setting_value('outbox_claim')::interval
    where o.claim = p_claim;
    return v_done;
end
$$;
comment on function settle.events_delivered(uuid, bigint[]) is 'Says that events of a claim were delivered.';

-- Purpose: says that a delivery failed: it is tried again after a wait that doubles, or set aside after the last try.
--   The rest of the claim is kept for as long again.
-- Returns: again, set_aside, or lost if the claim expired and somebody else has the event.
-- Tables written: settle.outbox. Locks: the rows of the claim, in id order. Clock: settle.clock().
create or replace function settle.event_failed(p_claim uuid, p_id bigint, p_error text)
returns text
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := settle.clock();
    v_most integer := greatest(settle.setting_value('outbox_tries')::integer, 1);
    v_last boolean;
begin
    perform from settle.outbox as o where o.claim = p_claim order by o.id for update;
    update settle.outbox as o
    set claim = null,
        last_error = left(p_error, 1000),
        set_aside_at = case when o.tries >= v_most then v_now end,
        due_at = v_now + least(
            settle.setting_value('outbox_backoff')::interval * (2 ^ least(o.tries - 1, 20)),
            settle.setting_value('outbox_backoff_max')::interval)
    where o.id = p_id and o.claim = p_claim
    returning o.set_aside_at is not null into v_last;
    update settle.outbox as o
    set due_at = v_now + settle.setting_value('outbox_claim')::interval
    where o.claim = p_claim;
    return case v_last when true then 'set_aside' when false then 'again' else 'lost' end;
end
$$;
comment on function settle.event_failed(uuid, bigint, text) is 'Says that the delivery of an event failed.';

-- Purpose: gives back what a deliverer had in hand and had not begun: no try is counted.
-- Returns: how many. Tables written: settle.outbox. Locks: the rows of the claim, in id order. Clock: settle.clock().
create or replace function settle.release_events(p_claim uuid)
returns integer
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := settle.clock();
    v_released integer;
begin
    perform from settle.outbox as o where o.claim = p_claim order by o.id for update;
    update settle.outbox as o
    set claim = null, tries = o.tries - 1, due_at = v_now
    where o.claim = p_claim;
    get diagnostics v_released = row_count;
    return v_released;
end
$$;
comment on function settle.release_events(uuid) is 'Gives back what a deliverer had not begun.';

-- Purpose: takes up again what was set aside, with all its tries anew. It may come after later events of its task
--   instance, which did not wait for it.
-- Arguments: p_listener; p_ids some of its events, null for all. Returns: how many. Raises: ST001.
-- Tables written: settle.outbox. Locks: its rows, in id order. Clock: settle.clock().
create or replace function settle.retry_events(p_listener text, p_ids bigint[] default null)
returns integer
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := settle.clock();
    v_again integer;
begin
    perform from settle.listener as n where n.name = p_listener;
    if not found then
        raise exception 'there is no listener %', coalesce(quote_literal(p_listener), 'null')
            using errcode = 'ST001', hint = 'settle.listeners shows those that there are.';
    end if;
    update settle.outbox as o
    set set_aside_at = null, tries = 0, due_at = v_now
    where o.id in (
        select l.id
        from settle.outbox as l
        where l.listener = p_listener
            and l.set_aside_at is not null
            and (p_ids is null or l.id = any(p_ids))
        order by l.id
        for update);
    get diagnostics v_again = row_count;
    return v_again;
end
$$;
comment on function settle.retry_events(text, bigint[]) is 'Takes up again what was set aside.';
