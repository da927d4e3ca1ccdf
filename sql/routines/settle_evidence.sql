-- Purpose: the one writer. Settles matched evidence of any source: decides, updates the task instances, appends to
--   the ledger, fills the outbox, calls the host's hook.
-- Arguments: p_source pass|report|person, p_pass the pass or null, p_evidence at most a page of it.
-- Returns: one settle.outcome for each piece of evidence, in no order.
-- Tables written: settle.task_instance (the host's), settle.settlement, settle.outbox, settle.suspicion, what the
--   hook writes.
-- Locks: rows of settle.task_instance that may change, in id order, for update; whoever holds one may write its
--   suspicion. Clock: settle.clock(), read once the locks are held.
-- The planner settings hold it to index lookups: with the statistics of an empty or never analysed ledger it would
-- choose hash joins over the whole of it, and a page of evidence is always small.
create or replace function settle.settle_evidence(p_source text, p_pass bigint, p_evidence settle.evidence[])
returns setof settle.outcome
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    -- A pod's creation is a whole second; the measured offset is good to half a second.
    c_created_within constant interval := interval '1.5 s';
    v_candidates uuid[];
    v_now timestamptz;
    v_offset interval;
    v_evidence settle.evidence[];
    v_written bigint[];
    v_moved uuid[];
    v_outcomes settle.outcome[];
begin
    -- Only what may change is locked: pods of settled attempts are seen again in every pass until they are collected.
    v_candidates := array(
        select distinct t.id
        from unnest(p_evidence) as e
        cross join lateral (select i.id, i.state from settle.task_instance as i where i.id = e.task_instance_id) as t
        where (e.verdict <> 'not_final' and t.state in ('queued', 'running', 'up_for_retry', 'failed'))
            -- Whoever writes a suspicion holds its task instance, so suspicions are never waited for.
            or (e.silence is not null and t.state in ('queued', 'running'))
            -- A person's word is not bound to an attempt_id: what is dispatched in this instant must not move unlocked.
            or p_source = 'person'
        order by t.id);
    perform
    from settle.task_instance as t
    where t.id = any(v_candidates)
    order by t.id
    for update;
    v_now := settle.clock();
    v_offset := coalesce((select p.clock_offset from settle.pass as p where p.id = p_pass), interval '0');

    -- Two pieces of evidence about one task instance must not be decided on the same row version: the
    -- strongest of each
    -- goes in the first round, the next one sees what it did.
    for v_evidence in
        select array_agg(r.e order by r.ord)
        from (
            select e, e.ord, row_number() over (
                partition by e.task_instance_id
                order by array_position(array['success', 'reschedule', 'failed', 'clear', 'not_final'], e.verdict),
                    e.silence is not null, not coalesce(e.from_record, false), e.failure_kind is null, e.ord) as round
            from unnest(p_evidence) as e
        ) as r
        group by r.round
        order by r.round
    loop
        with facts as materialized (
            select
                e, h.settled_at as last_settled_at, t.id, t.dag_id, t.run_id, t.task_id, t.map_index, t.state, t.try_number, t.max_tries, t.retry_delay,
                t.attempt_id, e.ord,
                h.id is not null and h.provisional as provisional, h.failure_kind as provisional_kind,
                -- A person who changed max_tries since began a new count.
                coalesce(h.refund = 1 and h.max_tries = t.max_tries, false) as provisional_refunded,
                case when h.max_tries = t.max_tries then h.refunds_used else 0 end as refunds_used,
                c.refund_cap, k.task_key, t.retries,
                t.id is not null
                and (e.try_number is null or e.try_number = t.try_number)
                and (p_source = 'person'
                    or case
                        when t.attempt_id is not null then e.attempt_id is not distinct from t.attempt_id
                        else t.queued_at is null
                            or coalesce(e.pod_created_at - v_offset + c_created_within > t.queued_at, false)
                    end) as same_attempt
            from unnest(v_evidence) as e
            left join lateral (select i.* from settle.task_instance as i where i.id = e.task_instance_id) as t on true
            left join lateral (
                select settle.task_key(t.dag_id, t.run_id, t.task_id, t.map_index) as task_key
            ) as k on true
            left join lateral (
                select s.id, s.settled_at, s.provisional, s.failure_kind, s.refund, s.max_tries, s.refunds_used
                from settle.settlement as s
                where s.task_key = k.task_key
                order by s.id desc
                limit 1
            ) as h on true
            left join lateral (select settle.refund_cap(t.dag_id, t.task_id) as refund_cap) as c on true
        ),
        decided as materialized (
            select
                f.*, d as decision, (d).disposition, (d).state as new_state, (d).max_tries as new_max_tries,
                case (d).backoff
                    when 'retry' then v_now + coalesce(f.retry_delay, interval '0')
                    when 'infra' then v_now + settle.infra_backoff(f.task_key, f.try_number)
                    when 'reschedule' then (f.e).reschedule_at
                end as next_try_at,
                (d).state is not null and (d).disposition <> 'confirmed' as moves,
                case when (d).state is not null then nextval('settle.settlement_id_seq') end as settlement_id,
                settle.decision_text(d, f.state, f.try_number, f.e, f.refund_cap, f.attempt_id) as why
            from facts as f
            cross join lateral settle.decide(
                f.state, f.try_number, f.max_tries, f.retries, f.same_attempt, (f.e).verdict, (f.e).failure_kind,
                case when (f.e).silence is not null then case when (f.e).ripe then 'ripe' else 'unripe' end end,
                f.refunds_used, f.refund_cap, f.provisional, f.provisional_kind, f.provisional_refunded) as d
            where f.id is not null
        ),
        moved as (
            update settle.task_instance as t
            set state = d.new_state,
                max_tries = d.new_max_tries,
                ended_at = case when d.new_state = 'none' then null else v_now end,
                next_try_at = d.next_try_at
            from decided as d
            where t.id = d.id and d.moves
        ),
        ledger as (
            insert into settle.settlement (
                id, settled_at, disposition, task_key, task_instance_id, dag_id, run_id, task_id, map_index, try_number, attempt_id,
                previous_state, state, verdict, failure_kind, reason, exit_code, next_try_at,
                refund, refunds_used, refund_cap, previous_max_tries, max_tries, provisional, from_record,
                rule, source, pass_id, namespace, pod, node, evidence, why)
            overriding system value
            select
                d.settlement_id, v_now, d.disposition, d.task_key, d.id, d.dag_id, d.run_id, d.task_id, d.map_index, d.try_number, d.attempt_id,
                d.state, d.new_state, (d.e).verdict, (d.e).failure_kind, (d.e).reason, (d.e).exit_code, d.next_try_at,
                (d.decision).refund, (d.decision).refunds_used, d.refund_cap, d.max_tries, d.new_max_tries,
                (d.decision).provisional, coalesce((d.e).from_record, false),
                (d.e).rule, p_source, p_pass, (d.e).namespace, (d.e).pod, (d.e).node, coalesce((d.e).facts, '{}'), d.why
            from decided as d
            where d.new_state is not null
            returning id, disposition, task_key
        ),
        told as (
            insert into settle.outbox (settlement_id, listener, task_key, created_at)
            select g.id, n.name, g.task_key, v_now
            from ledger as g
            cross join settle.listener as n
            where n.enabled and g.disposition <> 'confirmed'
        )
        select
            array_agg((
                d.ord, d.id, d.try_number, d.disposition, d.state, coalesce(d.new_state, d.state), d.max_tries, d.new_max_tries,
                (d.decision).refund, (d.decision).refunds_used, d.refund_cap, d.settlement_id, d.why,
                case when d.settlement_id is null then d.last_settled_at else v_now end
            )::settle.outcome),
            array_agg(d.settlement_id order by d.settlement_id) filter (where d.moves),
            array_agg(d.id) filter (where d.moves)
        into v_outcomes, v_written, v_moved
        from decided as d;

        if v_written is not null then
            delete from settle.suspicion as s where s.task_instance_id = any(v_moved);
            perform settle.after_transition(v_written);
        end if;
        return query select o.* from unnest(v_outcomes) as o;
    end loop;
end
$$;
comment on function settle.settle_evidence(text, bigint, settle.evidence[]) is 'The one writer of settlements.';
