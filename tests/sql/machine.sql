-- What test_machine.py adds to its database: a clock that stands still, and a player of scripts, so that a whole
-- example is one round trip. Task instances, attempts and passes are numbered from 0 as they are made.

create or replace function settle.clock() returns timestamptz language sql volatile
set search_path = pg_catalog, pg_temp as
$$ select current_setting('machine.now')::timestamptz $$;

create function public.moment(p_at bigint) returns timestamptz language sql immutable as
$$ select timestamptz '2026-09-01 00:00:00+00' + make_interval(mins => (p_at / 60000000)::int)
    + make_interval(secs => p_at % 60000000 / 1000000.0) $$;

create function public.micros(p_at timestamptz) returns bigint language sql immutable as
$$ select (extract(epoch from p_at - timestamptz '2026-09-01 00:00:00+00') * 1000000)::bigint $$;

create function public.play(p_script jsonb) returns jsonb language plpgsql as
$$
declare
    o jsonb;
    r jsonb;
    v_tasks uuid[] := '{}';
    v_attempts text[] := '{}';
    v_passes bigint[] := '{}';
    v_task uuid;
    v_attempt text;
    v_pass bigint;
    v_text text;
    v_number integer;
    v_out jsonb[] := '{}';
begin
    for o in select a.o from jsonb_array_elements(p_script) with ordinality as a (o, n) order by a.n loop
        if o ? 'at' then
            perform set_config('machine.now', public.moment((o ->> 'at')::bigint)::text, true);
        end if;
        r := null;
        v_task := v_tasks[(o ->> 'task')::int + 1];
        v_attempt := v_attempts[(o ->> 'attempt')::int + 1];
        v_pass := v_passes[(o ->> 'pass')::int + 1];
        -- Each operation is a transaction of its own that may be refused.
        begin
        case o ->> 'do'
            when 'create' then
                v_tasks := v_tasks || settle.create_task(
                    o ->> 'dag', 'r', o ->> 'name', -1, (o ->> 'retries')::int,
                    make_interval(secs => (o ->> 'retry_delay')::int), null, o ->> 'namespace');
            when 'dispatch' then
                select d.try_number, d.attempt_id into v_number, v_text from settle.dispatch(v_task) as d;
                v_attempts := v_attempts || v_text;
                r := to_jsonb(v_number);
            when 'started' then
                r := to_jsonb(settle.started(v_attempt));
            when 'raise' then
                update settle.task_instance as t set max_tries = t.max_tries + (o ->> 'by')::int where t.id = v_task;
            when 'setting' then
                update settle.setting set value = o ->> 'value' where name = o ->> 'name';
            when 'policy' then
                insert into settle.refund_policy (dag_id, task_id, max_infra_refunds)
                values (o ->> 'dag', o ->> 'name', (o ->> 'cap')::int)
                on conflict on constraint refund_policy_key do update set max_infra_refunds = excluded.max_infra_refunds;
            when 'listen' then
                perform settle.register_listener(o ->> 'name');
            when 'unlisten' then
                perform settle.unregister_listener(o ->> 'name');
            when 'report' then
                select jsonb_build_array(p.disposition, p.state) into r
                from settle.report(
                    v_attempt, o ->> 'outcome', (o ->> 'exit_code')::int, o ->> 'kind', o ->> 'reason',
                    public.moment((o ->> 'again')::bigint)) as p;
            when 'push' then
                select to_jsonb(p.disposition) into r from settle.push(v_attempt, o ->> 'key', o -> 'value') as p;
            when 'person' then
                select jsonb_build_array(p.disposition, p.previous_state, p.state, p.max_tries) into r
                from public.say(v_task, (o ->> 'try')::int, o ->> 'verdict', o ->> 'kind', o ->> 'reason',
                    public.moment((o ->> 'again')::bigint)) as p;
            when 'open' then
                v_pass := settle.open_pass(
                    o ->> 'namespace', 'podsettle', case when (o ->> 'api')::bool then 'api' else 'files' end);
                if v_pass is not null then
                    v_passes := v_passes || v_pass;
                end if;
                r := to_jsonb(v_pass is not null);
            when 'page' then
                select coalesce(jsonb_agg(
                    jsonb_build_array(p.disposition, p.previous_state, p.state, p.max_tries, p.refund)
                    order by p.ord), '[]') into r
                from settle.settle_pods(v_pass, (
                    select coalesce(jsonb_agg(e.p -> 'facts' || jsonb_build_object(
                        'identity', jsonb_build_object(
                            'task_instance_id', coalesce(v_tasks[(e.p ->> 'task')::int + 1], gen_random_uuid()),
                            'try_number', e.p -> 'try', 'attempt_id', v_attempts[(e.p ->> 'attempt')::int + 1]))
                        order by e.n), '[]')
                    from jsonb_array_elements(o -> 'pods') with ordinality as e (p, n))) as p;
            when 'close' then
                select coalesce(jsonb_agg(
                    jsonb_build_array(array_position(v_tasks, p.task_instance_id) - 1, p.rule, p.disposition, p.state)
                    order by array_position(v_tasks, p.task_instance_id)), '[]') into r
                from settle.close_pass(v_pass, (o ->> 'complete')::bool, array(
                    select v_tasks[s.n::int + 1] from jsonb_array_elements_text(o -> 'seen') as s (n))) as p;
        end case;
        exception
            when others then
                r := jsonb_build_object('error', sqlstate)
                    || case when sqlstate = 'ST003' then '{}' else jsonb_build_object('message', sqlerrm) end;
        end;
        v_out := v_out || jsonb_build_object(
            'result', r,
            'tasks', (
                select jsonb_agg(jsonb_build_array(
                    t.state, t.try_number, t.max_tries, array_position(v_attempts, t.attempt_id) - 1,
                    public.micros(t.next_try_at)) order by array_position(v_tasks, t.id))
                from settle.task_instance as t),
            'suspicions', (
                select coalesce(jsonb_agg(jsonb_build_array(
                    array_position(v_tasks, s.task_instance_id) - 1, s.cause, array_position(v_attempts, s.attempt_id) - 1,
                    s.pod, s.passes, (extract(epoch from s.age) * 1000000)::bigint)
                    order by array_position(v_tasks, s.task_instance_id)), '[]')
                from settle.suspicion as s),
            'ledger', (select count(*) from settle.settlement));
    end loop;
    return jsonb_build_object(
        'steps', to_jsonb(v_out),
        'ledger', (
            select coalesce(jsonb_agg(jsonb_build_object(
                'task', array_position(v_tasks, s.task_instance_id) - 1,
                'attempt', array_position(v_attempts, s.attempt_id) - 1,
                'try_number', s.try_number, 'disposition', s.disposition, 'verdict', s.verdict, 'kind', s.failure_kind,
                'reason', s.reason, 'previous', s.previous_state, 'state', s.state, 'refund', s.refund,
                'used', s.refunds_used, 'cap', s.refund_cap, 'previous_max', s.previous_max_tries,
                'max_tries', s.max_tries, 'provisional', s.provisional, 'record', s.from_record, 'source', s.source,
                'pod', s.pod, 'settled_at', public.micros(s.settled_at), 'next_try', public.micros(s.next_try_at),
                'rule', s.rule, 'told', (
                    select coalesce(jsonb_agg(x.listener order by x.listener), '[]')
                    from settle.outbox as x where x.settlement_id = s.id)) order by s.id), '[]')
            from settle.settlement as s),
        'outbox', (select count(*) from settle.outbox),
        'pushed', (
            select coalesce(jsonb_agg(jsonb_build_array(
                array_position(v_attempts, p.attempt_id) - 1, p.key, p.value)
                order by array_position(v_attempts, p.attempt_id), p.key), '[]')
            from settle.pushed as p),
        'open', (
            select coalesce(jsonb_agg(array_position(v_passes, p.id) - 1 order by p.id), '[]')
            from settle.pass as p where p.closed_at is null),
        'leases', (
            select coalesce(jsonb_agg(array_position(v_passes, l.pass_id) - 1 order by l.pass_id), '[]')
            from settle.lease as l));
end
$$;

-- The procedures for people, by one name.
create function public.say(
    p_task uuid, p_try integer, p_verdict text, p_kind text, p_reason text, p_at timestamptz,
    out disposition text, out previous_state text, out state text, out max_tries integer
) language plpgsql as
$$
declare
    v_why text;
begin
    case
        when p_verdict = 'success' then
            call settle.succeed(p_task, p_try, disposition, previous_state, state, max_tries, v_why);
        when p_verdict = 'reschedule' then
            call settle.reschedule(p_task, p_try, p_at, disposition, previous_state, state, max_tries, v_why);
        when p_verdict = 'clear' then
            call settle.clear(p_task, disposition, previous_state, state, max_tries, v_why);
        when p_try is null then
            call settle.mark_failed(p_task, p_reason, disposition, previous_state, state, max_tries, v_why);
        else
            call settle.fail(p_task, p_try, p_kind, p_reason, null, disposition, previous_state, state, max_tries, v_why);
    end case;
end
$$;
