-- Purpose: who may call what. Deny by default; reader, operator, agent and reconciler are siblings, not parent and
-- child: an agent must not be able to settle for others, a reconciler must not be able to clear.
revoke all on all tables in schema settle from public;
revoke all on all routines in schema settle from public;
grant usage on schema settle to settle_reconciler, settle_agent, settle_operator, settle_reader;
grant execute on function settle.contract_version() to settle_reconciler, settle_agent, settle_operator, settle_reader;

grant execute on function settle.open_pass(text, text, text) to settle_reconciler;
grant execute on function settle.settle_pods(bigint, jsonb) to settle_reconciler;
grant execute on function settle.note_clock(bigint, timestamptz, interval) to settle_reconciler;
grant execute on function settle.close_pass(bigint, boolean, uuid[]) to settle_reconciler;
grant execute on function settle.classify(jsonb) to settle_reconciler, settle_operator, settle_reader;
grant execute on function
settle.task_history(uuid, text, text, text, integer), settle.report_figures(integer)
to settle_reconciler, settle_operator, settle_reader;

-- An agent speaks for the attempt whose id it knows, and reads nothing.
grant execute on function
settle.report(text, text, integer, text, text, timestamptz),
settle.push(text, text, jsonb)
to settle_agent;

grant execute on procedure
settle.succeed(uuid, integer, text, text, text, integer, text),
settle.fail(uuid, integer, text, text, integer, text, text, text, integer, text),
settle.reschedule(uuid, integer, timestamptz, text, text, text, integer, text),
settle.mark_failed(uuid, text, text, text, text, integer, text),
settle.clear(uuid, text, text, text, integer, text)
to settle_operator;
grant execute on function settle.register_listener(text), settle.unregister_listener(text) to settle_operator;
grant execute on function settle.retry_events(text, bigint[]) to settle_operator, settle_reconciler;

-- A deliverer, which a pass starts.
grant execute on function
settle.ensure_listeners(text[]),
settle.claim_events(text, uuid, integer),
settle.events_delivered(uuid, bigint[]),
settle.event_failed(uuid, bigint, text),
settle.release_events(uuid)
to settle_reconciler;

-- Configuration is plain rows: the constraints refuse what cannot be.
grant select, update (value) on settle.setting to settle_operator;
grant select, insert, update, delete on settle.refund_policy, settle.failure_rule to settle_operator;
grant select on settle.setting, settle.refund_policy, settle.failure_rule to settle_reader, settle_reconciler;

grant select on settle.unsettled, settle.settlements, settle.refunds, settle.failures, settle.passes,
settle.suspicions, settle.pushes, settle.provisional, settle.listeners, settle.stuck_events,
settle.metrics, settle.refunds_by_node
to settle_reader, settle_operator, settle_reconciler;

-- Functions in a view run with the rights of its reader.
grant execute on function settle.clock(), settle.grace(text), settle.setting_value(text), settle.metric_reason(text)
to settle_reader, settle_operator, settle_reconciler;

-- What only some hosts have: an orchestrator's calls.
do $$
declare
    v_routine regprocedure;
begin
    for v_routine in
        select p.oid
        from pg_catalog.pg_proc as p
        where p.pronamespace = 'settle'::regnamespace and p.proname in ('create_task', 'dispatch', 'started')
    loop
        execute format('grant execute on routine %s to settle_operator', v_routine);
    end loop;
end
$$;
