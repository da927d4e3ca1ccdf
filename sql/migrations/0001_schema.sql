-- Purpose: the roles, the schema and the ledger of what was installed. Every later file runs as settle_owner.
-- Locks: the installer holds the advisory lock (7001, 1) for the transaction, so concurrent installs queue.
do $$
declare
    v_role text;
begin
    foreach v_role in array array[
        'settle_owner', 'settle_reconciler', 'settle_agent', 'settle_operator', 'settle_reader'
    ]
    loop
        -- Roles belong to the whole server: another database's install may have made them, or may be making them.
        begin
            execute format('create role %I nologin', v_role);
        exception
            when duplicate_object or unique_violation then null;
        end;
    end loop;
    if not pg_has_role(current_user, 'settle_owner', 'member') then
        execute format('grant settle_owner to %I', current_user);
    end if;
end
$$;

create schema settle authorization settle_owner;
comment on schema settle is 'podsettle: settles Kubernetes task pods. Tables are private, routines are the API.';

set local role settle_owner;

-- Without "in schema": a per-schema revoke does not take away what PUBLIC has by default.
alter default privileges for role settle_owner revoke execute on functions from public;
alter default privileges for role settle_owner revoke usage on types from public;

create table settle.migration (
    name text not null,
    checksum text not null,
    applied_at timestamptz not null default now(),
    applied_by text not null default session_user,
    constraint migration_pkey primary key (name),
    constraint migration_checksum_check check (checksum ~ '^[0-9a-f]{64}$')
);
comment on table settle.migration is
'What was installed, by file. A migration whose checksum changed is refused; other files are applied again.';
