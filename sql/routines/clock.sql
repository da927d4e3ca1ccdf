-- Purpose: the one clock of all decisions about time.
-- Returns: the database's time, moving within a transaction; a call reads it once and decides on that.
create or replace function settle.clock()
returns timestamptz
language sql
volatile
-- Views read it, and a function in a view runs with the rights of whoever reads.
security definer
set search_path = pg_catalog, pg_temp
as $$ select clock_timestamp() $$;
comment on function settle.clock() is 'The clock of all decisions.';
