-- Purpose: the one mechanism for what rests on silence (I6): seen, counted by complete passes, ripe or dead.

-- Purpose: the grace of a cause, from the settings; a pod's own termination grace comes on top.
create or replace function settle.grace(p_cause text)
returns interval
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$ select settle.setting_value(p_cause || '_after')::interval $$;
comment on function settle.grace(text) is 'How long a suspicion of this cause must last.';

-- Purpose: keeps suspicions: a new one starts to count, one of the same cause, attempt and pod is seen again.
-- Arguments: p_pass who saw it; p_evidence of what the decision called suspected, silence is the cause.
-- Tables written: settle.suspicion. Locks: its rows; the caller holds their task instances, so nobody waits for them.
--   Clock: settle.clock().
create or replace function settle.suspect(p_pass bigint, p_evidence settle.evidence[])
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := settle.clock();
    v_opened_at timestamptz := (select p.opened_at from settle.pass as p where p.id = p_pass);
begin
    -- A task instance has one suspicion. It goes on while it is still seen, whatever else is (two doubtful pods of one
    -- attempt must not end each other's for ever); another takes its place when it is of an earlier attempt, or was not
    -- seen since this pass opened.
    delete from settle.suspicion as s
    using unnest(p_evidence) as e
    where s.task_instance_id = e.task_instance_id
        and (s.last_seen_at < v_opened_at
            or (s.try_number, s.attempt_id) is distinct from (e.try_number, e.attempt_id))
        and not exists (
            select
            from unnest(p_evidence) as same
            where same.task_instance_id = s.task_instance_id
                and (same.silence, same.try_number, same.attempt_id, same.pod)
                is not distinct from (s.cause, s.try_number, s.attempt_id, s.pod));
    insert into settle.suspicion as s (
        task_instance_id, cause, try_number, attempt_id, failure_kind, reason, rule, exit_code, namespace, pod, node,
        own_grace, evidence, first_seen_at, last_seen_at, seen_by)
    select distinct on (e.task_instance_id)
        e.task_instance_id, e.silence, e.try_number, e.attempt_id, e.failure_kind, e.reason, e.rule, e.exit_code,
        e.namespace, e.pod, e.node,
        case when e.silence = 'terminating'
            then make_interval(secs => coalesce(
                (e.facts ->> 'deletion_grace_seconds')::integer, (e.facts ->> 'termination_grace_seconds')::integer, 30))
            else interval '0' end,
        e.facts, v_now, v_now, array[p_pass]
    from unnest(p_evidence) as e
    left join settle.suspicion as kept on kept.task_instance_id = e.task_instance_id
    where kept.task_instance_id is null or (kept.cause, kept.pod) is not distinct from (e.silence, e.pod)
    order by e.task_instance_id, e.ord
    on conflict on constraint suspicion_pkey do update
    set last_seen_at = greatest(s.last_seen_at, excluded.last_seen_at),
        reason = excluded.reason,
        evidence = excluded.evidence,
        own_grace = excluded.own_grace,
        seen_by = array(
            select p.id
            from settle.pass as p
            where p.id = any(s.seen_by || p_pass) and p.closed_at is null
            -- Passes that were killed never close.
            order by p.id desc
            limit 16);
end
$$;
comment on function settle.suspect(bigint, settle.evidence[]) is 'Keeps what is only suspected.';

-- Purpose: what a complete pass concludes from silence. In this order: who is absent; what ripened is settled,
--   provisionally; what was seen is counted; what was not seen any more dies.
-- Arguments: p_pass; p_seen, the task instances of which a pod of the current attempt was seen.
-- Returns: one row for each suspicion that was settled.
-- Tables written: see settle.settle_evidence; settle.suspicion, settle.stranger. Locks: the task instances of all
--   that it judges, in id order, before any suspicion of theirs; then strangers, in id order.
--   Clock: settle.clock(), read once.
create or replace function settle.judge_silence(p_pass bigint, p_seen uuid[])
returns setof settle.settled_pod
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz;
    v_gap interval := settle.setting_value('pass_gap')::interval;
    v_pass settle.pass;
    v_judged uuid[];
    v_absent settle.evidence[] := array[]::settle.evidence[];
    v_ripe settle.evidence[];
    v_outcomes settle.outcome[];
begin
    select p.* into strict v_pass from settle.pass as p where p.id = p_pass;

    -- Whoever writes a suspicion holds its task instance, so suspicions are never waited for: all of these first, in
    -- id order, and nothing beyond them is touched.
    v_judged := array(
        select t.id
        from settle.task_instance as t
        where t.state in ('queued', 'running')
            and t.queued_at < v_pass.opened_at
            and (v_pass.namespace is null or t.namespace = v_pass.namespace)
            and not (t.id = any(p_seen))
        union
        select s.task_instance_id
        from settle.suspicion as s
        where v_pass.namespace is null or s.namespace = v_pass.namespace);
    perform
    from settle.task_instance as t
    where t.id = any(v_judged)
    order by t.id
    for update;
    v_now := settle.clock();

    if settle.setting_value('judge_absence')::boolean then
        v_absent := array(
            select (
                1, t.id, t.try_number, t.attempt_id, null, 'failed', 'infra',
                case t.state when 'running' then 'PodDeleted' else 'PodAbsent' end, null, null, false, 'absent', false,
                'absent', t.namespace, null, null, jsonb_build_object('state', t.state, 'queued_at', t.queued_at)
            )::settle.evidence
            from settle.task_instance as t
            where t.id = any(v_judged)
                and t.state in ('queued', 'running')
                -- One that was dispatched while the list was read may have a pod that the list could not hold.
                and t.queued_at < v_pass.opened_at
                and (v_pass.namespace is null or t.namespace = v_pass.namespace)
                and not (t.id = any(p_seen)));
    end if;

    v_ripe := array(
        select (
            row_number() over (order by s.task_instance_id), s.task_instance_id, s.try_number, s.attempt_id,
            -- A host without attempt_id is guarded by time: of the pod, or of when it was first missed.
            coalesce((s.evidence ->> 'created_at')::timestamptz,
                s.first_seen_at + coalesce(v_pass.clock_offset, interval '0')),
            'failed', s.failure_kind, coalesce(a.reason, s.reason), s.exit_code, null, false, s.cause, true, s.rule,
            s.namespace, s.pod, s.node,
            s.evidence || jsonb_build_object('suspected_since', s.first_seen_at, 'complete_passes', s.passes + 1)
        )::settle.evidence
        from settle.suspicion as s
        left join unnest(v_absent) as a
            on s.cause = 'absent'
            and (a.task_instance_id, a.try_number) = (s.task_instance_id, s.try_number)
            and a.attempt_id is not distinct from s.attempt_id
        where s.task_instance_id = any(v_judged)
            and (v_pass.namespace is null or s.namespace = v_pass.namespace)
            and s.passes >= 1
            and settle.aged(s, v_now, v_gap) >= settle.grace(s.cause) + s.own_grace
            and case s.cause when 'absent' then a.task_instance_id is not null else p_pass = any(s.seen_by) end);
    v_outcomes := array(select o from settle.settle_evidence('pass', p_pass, v_ripe) as o);

    perform settle.suspect(p_pass, array(
        select e
        from unnest(v_absent) as e
        where not exists (select from unnest(v_outcomes) as o where o.task_instance_id = e.task_instance_id)));

    delete from settle.suspicion as s
    where s.task_instance_id = any(v_judged)
        and (v_pass.namespace is null or s.namespace = v_pass.namespace)
        and (s.last_seen_at < v_pass.opened_at
            or exists (
                select
                from unnest(v_outcomes) as o
                where o.task_instance_id = s.task_instance_id and o.disposition in ('stale', 'duplicate')));
    update settle.suspicion as s
    set age = settle.aged(s, v_now, v_gap), passes = s.passes + 1, counted_at = v_now
    where s.task_instance_id = any(v_judged)
        and (v_pass.namespace is null or s.namespace = v_pass.namespace)
        -- Seen by another pass meanwhile, it lives; only who saw it counts it.
        and p_pass = any(s.seen_by);

    delete from settle.stranger as s
    where s.uid in (
        select l.uid
        from settle.stranger as l
        where l.last_seen_at < v_pass.opened_at and (v_pass.namespace is null or l.namespace = v_pass.namespace)
        order by l.uid
        for update);

    return query
    select
        null::integer, r.pod, r.namespace, r.task_instance_id, r.try_number, r.silence = 'no_record', r.verdict, false,
        r.failure_kind, r.reason, r.rule, o.disposition, o.previous_state, o.state, o.previous_max_tries, o.max_tries,
        o.refund, o.settlement_id, o.why, false, interval '0'
    from unnest(v_ripe) as r
    inner join unnest(v_outcomes) as o on o.ord = r.ord
    where o.settlement_id is not null
    order by r.ord;
end
$$;
comment on function settle.judge_silence(bigint, uuid[]) is 'What a complete pass concludes from silence.';

-- Purpose: the age of a suspicion if it is counted now: time since the last complete pass that saw it counts only if
-- passes kept running in it.
create or replace function settle.aged(p_suspicion settle.suspicion, p_now timestamptz, p_gap interval)
returns interval
language sql
immutable
set search_path = pg_catalog, pg_temp
as $$
    select (p_suspicion).age + case
        when p_now - (p_suspicion).counted_at <= p_gap
            then greatest(p_now - (p_suspicion).counted_at, interval '0')
        else interval '0'
    end
$$;
comment on function settle.aged(settle.suspicion, timestamptz, interval) is
'The counted age of a suspicion at a moment.';
