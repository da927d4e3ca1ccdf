-- Purpose: what people and dashboards read. Views run with the rights of settle_owner; the tables stay private.

create or replace view settle.unsettled as
select
    t.id as task_instance_id, t.dag_id, t.run_id, t.task_id, t.map_index, t.state, t.try_number, t.max_tries,
    t.attempt_id is not null as has_attempt_id, t.queued_at, t.started_at, settle.clock() - t.queued_at as age
from settle.task_instance as t
where t.state in ('queued', 'running');
comment on view settle.unsettled is 'Task instances with an attempt that is not settled yet.';

create or replace view settle.settlements as
select
    s.id, s.settled_at, s.disposition, s.task_instance_id, s.dag_id, s.run_id, s.task_id, s.map_index, s.try_number,
    s.previous_state, s.state, s.verdict, s.failure_kind, s.reason, s.exit_code, s.next_try_at, s.refund,
    s.refunds_used, s.refund_cap, s.max_tries, s.provisional, s.from_record, s.rule, s.source, s.actor, s.pass_id,
    s.namespace, s.pod, s.node, s.why, s.evidence
from settle.settlement as s;
comment on view settle.settlements is 'The ledger, oldest first by id.';

create or replace view settle.refunds as
select
    s.id, s.settled_at, s.dag_id, s.run_id, s.task_id, s.map_index, s.try_number, s.reason, s.refund, s.refunds_used,
    s.refund_cap, s.max_tries, s.node, s.why
from settle.settlement as s
where s.refund <> 0;
comment on view settle.refunds is 'Refunds of infra failures; refund -1 is one that was taken back.';

create or replace view settle.failures as
select
    s.id, s.settled_at, s.dag_id, s.run_id, s.task_id, s.map_index, s.try_number, s.failure_kind, s.reason, s.exit_code,
    s.state, s.refund, s.provisional, s.node, s.namespace, s.pod, s.why
from settle.settlement as s
where s.verdict = 'failed' and s.disposition = 'settled';
comment on view settle.failures is 'Failed attempts with their kind and reason.';

create or replace view settle.passes as
select
    p.id, p.opened_at, p.closed_at, p.closed_at - p.opened_at as duration, p.namespace, p.profile, p.source, p.complete,
    p.counts, p.clock_offset, p.opened_by
from settle.pass as p;
comment on view settle.passes is 'Passes of the reconciler.';

create or replace view settle.suspicions as
select
    t.dag_id, t.run_id, t.task_id, t.map_index, s.task_instance_id, s.try_number, s.cause, s.failure_kind, s.reason,
    s.namespace, s.pod, s.node, s.first_seen_at, s.last_seen_at, s.passes, s.age,
    settle.grace(s.cause) + s.own_grace as grace,
    greatest(settle.grace(s.cause) + s.own_grace - s.age, interval '0') as time_left
from settle.suspicion as s
inner join settle.task_instance as t on s.task_instance_id = t.id
where t.state in ('queued', 'running');
comment on view settle.suspicions is
'What is suspected and not settled yet; time_left counts only while complete passes run.';

create or replace view settle.pushes as
select p.task_instance_id, p.attempt_id, p.key, p.value, p.pushed_at
from settle.pushed as p;
comment on view settle.pushes is 'What the agents of attempts pushed.';

create or replace view settle.provisional as
select
    s.id, s.settled_at, s.task_instance_id, s.dag_id, s.run_id, s.task_id, s.map_index, s.try_number, s.state,
    s.failure_kind, s.reason, s.refund, s.pod, s.node, s.why
from settle.settlement as s
inner join settle.task_instance as t
    on
        s.task_instance_id = t.id
        and s.try_number = t.try_number
        and s.attempt_id is not distinct from t.attempt_id
where
    s.provisional
    and t.state in ('up_for_retry', 'failed')
    and not exists (
        select
        from settle.settlement as later
        where later.task_key = s.task_key and later.id > s.id
    );
comment on view settle.provisional is
'Settlements that rest on silence and that a late success of the same attempt would still replace.';
