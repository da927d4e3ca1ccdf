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

create or replace view settle.listeners as
select
    n.name, n.enabled, n.registered_at, coalesce(o.pending, 0) as pending, coalesce(o.due, 0) as due,
    coalesce(o.in_hand, 0) as in_hand, coalesce(a.set_aside, 0) as set_aside, o.oldest_at,
    settle.clock() - o.oldest_at as oldest_age
from settle.listener as n
left join lateral (
    select
        count(*) as pending, min(p.created_at) as oldest_at, count(*) filter (where p.claim is not null) as in_hand,
        count(*) filter (
            where (p.due_at is null or p.due_at <= settle.clock())
            and not exists (
                select
                from settle.outbox as e
                where
                    e.listener = p.listener and e.task_key = p.task_key and e.id < p.id
                    and e.delivered_at is null and e.set_aside_at is null
            )
        ) as due
    from settle.outbox as p
    where p.listener = n.name and p.delivered_at is null and p.set_aside_at is null
) as o on true
left join lateral (
    select count(*) as set_aside
    from settle.outbox as p
    where p.listener = n.name and p.set_aside_at is not null
) as a on true;
comment on view settle.listeners is
'Who is told, and how much of it is open. pending: not delivered and not set aside; due: to be delivered now.';

create or replace view settle.stuck_events as
select
    o.id, o.listener, o.created_at, settle.clock() - o.created_at as age, o.tries,
    o.set_aside_at is not null as set_aside,
    case when o.set_aside_at is null then o.due_at end as due_at, o.last_error, s.dag_id, s.run_id, s.task_id,
    s.map_index, s.try_number, s.state, s.failure_kind, s.reason
from settle.outbox as o
inner join settle.settlement as s on o.settlement_id = s.id
where
    o.set_aside_at is not null
    or (
        o.delivered_at is null
        and (
            o.last_error is not null
            or o.created_at < settle.clock() - settle.setting_value('outbox_stuck_after')::interval
        )
    );
comment on view settle.stuck_events is
'Events that were set aside, failed and are tried again, or are open for longer than setting outbox_stuck_after.';

create or replace view settle.metrics as
select
    'podsettle_ti_failures_total' as name, 'counter' as kind, 'failed attempts, retried or not' as help,
    jsonb_build_object('dag_id', g.dag_id, 'task_id', g.task_id, 'failure_kind', g.failure_kind, 'reason', g.reason)
        as labels,
    sum(g.n)::double precision as value
from (
    select
        f.dag_id, f.task_id, coalesce(f.failure_kind, 'none') as failure_kind,
        settle.metric_reason(f.reason) as reason, f.n
    from (
        select s.dag_id, s.task_id, s.failure_kind, s.reason, count(*) as n
        from settle.settlement as s
        where s.verdict = 'failed' and s.disposition = 'settled'
        group by s.dag_id, s.task_id, s.failure_kind, s.reason
    ) as f
) as g
group by g.dag_id, g.task_id, g.failure_kind, g.reason
union all
select
    'podsettle_operator_failures_total' as name, 'counter' as kind, 'failed attempts by operator' as help,
    jsonb_build_object(
        'operator', coalesce(t.operator, 'unknown'), 'failure_kind', coalesce(s.failure_kind, 'none')
    ) as labels,
    count(*) as value
from settle.settlement as s
left join settle.task_instance as t
    on
        s.dag_id = t.dag_id and s.run_id = t.run_id and s.task_id = t.task_id
        and s.map_index = t.map_index
where s.verdict = 'failed' and s.disposition = 'settled'
group by t.operator, s.failure_kind
union all
select
    'podsettle_refunds_total' as name, 'counter' as kind, 'infra failures that were not charged' as help,
    jsonb_build_object('dag_id', g.dag_id, 'reason', g.reason) as labels, sum(g.n) as value
from (
    select f.dag_id, settle.metric_reason(f.reason) as reason, f.n
    from (
        select s.dag_id, s.reason, count(*) as n
        from settle.settlement as s
        where s.refund = 1
        group by s.dag_id, s.reason
    ) as f
) as g
group by g.dag_id, g.reason
union all
select
    'podsettle_refunds_taken_back_total' as name, 'counter' as kind, 'refunds that a late success took back' as help,
    '{}'::jsonb as labels, count(*) as value
from settle.settlement as s
where s.refund = -1
union all
select
    'podsettle_refunds_refused_total' as name, 'counter' as kind, 'infra failures charged: at the cap' as help,
    jsonb_build_object('dag_id', s.dag_id) as labels, count(*) as value
from settle.settlement as s
where s.verdict = 'failed' and s.disposition = 'settled' and s.failure_kind = 'infra' and s.refund = 0
group by s.dag_id
union all
select
    'podsettle_settlements_total' as name, 'counter' as kind, 'transitions, by who brought the evidence' as help,
    jsonb_build_object('source', s.source, 'verdict', s.verdict) as labels, count(*) as value
from settle.settlement as s
where s.disposition <> 'confirmed'
group by s.source, s.verdict
union all
select
    'podsettle_suspicions_open' as name, 'gauge' as kind, 'what rests on silence and is not settled yet' as help,
    jsonb_build_object('cause', c.cause) as labels, count(s.cause) as value
from (values ('absent'), ('no_record'), ('pending'), ('terminating')) as c (cause)
left join settle.suspicions as s on c.cause = s.cause
group by c.cause
union all
select
    'podsettle_unsettled_task_instances' as name, 'gauge' as kind,
    'task instances with an attempt that is not settled yet' as help,
    jsonb_build_object('state', c.state) as labels, count(u.state) as value
from (values ('queued'), ('running')) as c (state)
left join settle.unsettled as u on c.state = u.state
group by c.state
union all
select
    m.name, 'gauge' as kind, m.help, jsonb_build_object('namespace', coalesce(p.namespace, '*')) as labels, m.value
from (
    select distinct on (p.namespace) p.namespace, p.id, p.opened_at, p.closed_at, p.counts
    from settle.pass as p
    where p.closed_at is not null
    order by p.namespace asc, p.id desc
) as p
cross join
    lateral (
        values
        (
            'podsettle_pass_duration_seconds', 'how long the last pass took',
            extract(epoch from p.closed_at - p.opened_at)::double precision
        ),
        (
            'podsettle_pass_pods', 'pods that the last pass listed',
            -- What ripened is counted as settled and was no pod of the list.
            (select coalesce(sum(c.value::bigint), 0) from jsonb_each_text(p.counts) as c where c.key <> 'refunded')
            - (
                select count(*)
                from settle.settlement as s
                where s.provisional and s.pass_id = p.id
            )
        )
    ) as m (name, help, value)
union all
select
    'podsettle_last_complete_pass_timestamp_seconds' as name, 'gauge' as kind,
    'when the last complete pass was closed' as help,
    jsonb_build_object('namespace', coalesce(p.namespace, '*')) as labels,
    extract(epoch from max(p.closed_at))::double precision as value
from settle.pass as p
where p.complete
group by p.namespace
union all
select
    m.name, 'gauge' as kind, m.help, jsonb_build_object('listener', n.name) as labels, m.value
from settle.listeners as n
cross join
    lateral (
        values
        ('podsettle_outbox_pending', 'events that were not delivered yet', n.pending),
        ('podsettle_outbox_set_aside', 'events that were given up after their last try', n.set_aside),
        (
            'podsettle_outbox_oldest_seconds', 'age of the oldest event that was not delivered yet',
            coalesce(extract(epoch from n.oldest_age)::double precision, 0)
        )
    ) as m (name, help, value)
where n.enabled;
comment on view settle.metrics is
'Every metric by its Prometheus name, from the ledger: name, kind, help, labels, value.';

create or replace view settle.refunds_by_node as
select
    s.node, s.reason, count(*) filter (where s.refund = 1) as refunds,
    count(*) filter (where s.refund = -1) as taken_back, max(s.settled_at) as last_at
from settle.settlement as s
where s.refund <> 0 and s.settled_at > settle.clock() - interval '7 days'
group by s.node, s.reason;
comment on view settle.refunds_by_node is 'Refunds of the last 7 days by node and reason.';
