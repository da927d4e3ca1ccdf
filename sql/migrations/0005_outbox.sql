-- Purpose: delivery: how far each outbox row has come, who has it in hand, and the settings of retries.

alter table settle.outbox
add column task_key uuid,
add column tries integer not null default 0,
add column due_at timestamptz,
add column claim uuid,
add column last_error text,
add column delivered_at timestamptz,
add column set_aside_at timestamptz,
add constraint outbox_tries_check check (tries >= 0),
add constraint outbox_end_check check (delivered_at is null or set_aside_at is null),
add constraint outbox_claim_check check (
    claim is null or (tries > 0 and due_at is not null and delivered_at is null and set_aside_at is null)
);
update settle.outbox as o
set task_key = s.task_key
from settle.settlement as s
where o.settlement_id = s.id;
alter table settle.outbox alter column task_key set not null;

comment on column settle.outbox.task_key is 'of the settlement: events of one task instance are told in order of id';
comment on column settle.outbox.tries is 'deliveries begun';
comment on column settle.outbox.due_at is 'not claimed before, null: at once; while claimed, when the claim expires';
comment on column settle.outbox.claim is 'whoever has it in hand; it must still be this one to finish it';
comment on column settle.outbox.set_aside_at is
'when it was given up after setting outbox_tries; settle.retry_events() takes it up again';

-- What is open is little, however long the history: these hold nothing else.
create index outbox_due_idx on settle.outbox (listener, tries, id)
where delivered_at is null and set_aside_at is null;
create index outbox_order_idx on settle.outbox (listener, task_key, id)
where delivered_at is null and set_aside_at is null;
create index outbox_claim_idx on settle.outbox (claim) where claim is not null;
create index outbox_set_aside_idx on settle.outbox (listener, id) where set_aside_at is not null;

insert into settle.setting (name, value, kind, description) values
('outbox_tries', '8', 'count', 'deliveries of an event to a listener before it is set aside'),
('outbox_claim', '2 min', 'interval', 'how long a deliverer that went silent keeps its events from others'),
('outbox_backoff', '15 s', 'interval', 'wait after the first failed delivery; doubled after each further one'),
('outbox_backoff_max', '15 min', 'interval', 'longest wait between two deliveries of an event'),
('outbox_stuck_after', '5 min', 'interval', 'an event that is open for longer is shown as stuck');

create type settle.claimed_event as (
    id bigint,
    tries integer,
    event jsonb
);
comment on type settle.claimed_event is
'An event in hand: its id to deduplicate by, which delivery this is, what happened.';
