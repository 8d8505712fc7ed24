# PostgreSQL on $DISK in user-mode Linux. Variables: DISK, ATOMIC (the program of atomic.c, if the kernel knows atomic
# writes), MAKE (in the first boot only: the commands that make the file system and mount it at disk), SEED, POSTGRESQL
# (a directory with db, a new cluster, and direct.so, the library of direct.c), and WORK (if set, clients work until the
# power is cut). It runs in an empty directory in memory.
say() { echo "guest: $*"; }
export PATH=/usr/lib/postgresql/15/bin:$PATH PGHOST=$PWD PGUSER=postgres
sql() { psql --no-psqlrc --quiet --tuples-only --no-align --field-separator=' ' --pset=pager=off --set=ON_ERROR_STOP=1 2>&1; }
mkdir disk && mkdir -m 1777 /dev/shm && chown nobody . && cp "$POSTGRESQL/direct.so" .

# The server does not run as root.
start() {
    setpriv --reuid=nobody --regid=nogroup --clear-groups env LD_PRELOAD="$PWD/direct.so" postgres -D disk/db >log 2>&1 &
    server=$!
    until grep -q 'ready to accept connections' log; do
        kill -0 $server 2>/dev/null || { say no server; sed 's/^/guest: log: /' log; return 1; }
        sleep 0.2
    done
}

# What a session begins with. O_DIRECT is 040000 of a file's flags, which Linux prints in octal.
settings="SELECT 'guest: server', current_setting('full_page_writes'), current_setting('fsync'),
    current_setting('synchronous_commit'), current_setting('data_checksums'), current_setting('block_size'),
    (SELECT CASE WHEN COUNT(*) > 0 THEN 'O_DIRECT' ELSE 'buffered' END FROM pg_ls_dir('/proc/self/fd') AS file
    WHERE pg_read_file('/proc/self/fdinfo/' || file, 0, 1000, true) ~ 'flags:\\s+\\d*[4567]\\d{4}\\s');"

# Makes the accounts, 4 rows per page and room for as many, and the ledger: for each client the amounts that it moved
# between accounts. PostgreSQL is to write pages and make checkpoints all the time, and each page once. So the settings
# are a small buffer pool, a small log of its own, and no full-page writes, which are a copy of each page in that log.
create() {
    cp -r "$POSTGRESQL/db" disk/ && chown -R nobody disk/db && cat >>disk/db/postgresql.conf <<END
full_page_writes = off
shared_buffers = 2MB
min_wal_size = 2MB
max_wal_size = 4MB
listen_addresses = ''
unix_socket_directories = '$PWD'
END
    start && sql <<END && sync && say created
$settings
CREATE EXTENSION amcheck;
CREATE TABLE accounts (id INT PRIMARY KEY, balance BIGINT NOT NULL, note TEXT NOT NULL) WITH (fillfactor = 50);
CREATE INDEX ON accounts (balance);
CREATE TABLE ledger (client INT, number INT, source INT NOT NULL, target INT NOT NULL, amount INT NOT NULL,
    PRIMARY KEY (client, number));
INSERT INTO accounts SELECT id, 1000, repeat('-', 900) FROM generate_series(0, 2047) AS id;
CHECKPOINT;
END
}

# A client prints each commit once the server has answered it. The test outside of this machine keeps these lines as
# its journal. Clients lock accounts in the order of their numbers, so that no two clients wait for each other.
client() {
    awk -v client="$1" -v seed="$SEED$1" 'BEGIN {
        srand(seed)
        printf "SELECT COALESCE(MAX(number), 0) AS last FROM ledger WHERE client = %d \\gset\n", client
        while (1) {
            number++
            source = int(rand() * 2048); target = (source + 1 + int(rand() * 2047)) % 2048; amount = int(rand() * 100)
            print "BEGIN;"
            printf "INSERT INTO ledger VALUES (%d, :last + %d, %d, %d, %d);\n", client, number, source, target, amount
            for (turn = 0; turn < 2; turn++) {
                id = (turn == 0) == (source < target) ? source : target
                printf "UPDATE accounts SET balance = balance + %d, note = repeat(chr(%d), 900) WHERE id = %d;\n",
                    id == source ? -amount : amount, 97 + number % 26, id
            }
            printf "COMMIT;\nSELECT $$guest: acknowledged %d$$, :last + %d;\n", client, number
        }
    }' | sql
}

# Waits until the server has written 100 pages more. Its processes count them every second.
flushed() {
    sql <<'END'
DO $$
DECLARE goal BIGINT;
BEGIN
    LOOP
        goal := COALESCE(goal, 100 + (SELECT buffers_checkpoint + buffers_clean + buffers_backend FROM pg_stat_bgwriter));
        EXIT WHEN goal <= (SELECT buffers_checkpoint + buffers_clean + buffers_backend FROM pg_stat_bgwriter);
        COMMIT;
        PERFORM pg_sleep(0.1);
    END LOOP;
END $$;
SELECT 'guest: flushed';
END
}

# Each balance must be the first balance plus the amounts in the ledger.
check() {
    sql >report <<END
$settings
SELECT 'damaged:', * FROM verify_heapam('accounts') UNION ALL SELECT 'damaged:', * FROM verify_heapam('ledger');
SELECT 'guest: checked index', index FROM (VALUES ('accounts_pkey'), ('accounts_balance_idx'), ('ledger_pkey')) AS indexes (index),
    bt_index_parent_check(index, heapallindexed => true, rootdescend => true);
SELECT 'guest: wrong balances', COUNT(*) || ', accounts', (SELECT COUNT(*) FROM accounts) FROM accounts LEFT JOIN (SELECT id, SUM(amount) AS moved FROM
    (SELECT source AS id, -amount AS amount FROM ledger UNION ALL SELECT target, amount FROM ledger) AS moves GROUP BY id) AS moves
    USING (id) WHERE balance <> 1000 + COALESCE(moved, 0);
SELECT 'guest: ledger', client, COUNT(*), MIN(number), MAX(number) FROM ledger GROUP BY client;
SELECT 'file:', pg_relation_filepath('accounts');
END
    sed '/^file: /d; /^guest: /!s/^/guest: damaged: /' report
    grep -q 'automatic recovery in progress' log && say recovered
    grep -E 'WARNING|ERROR|FATAL|PANIC' log | sed 's/^/guest: alarm: /'
    [ -z "$ATOMIC" ] || "$ATOMIC" --unit "disk/db/$(sed -n 's/^file: //p' report)"
    # Prints the locations on the disk, in blocks of 4 KiB, of the 512 pages that the table has had from the beginning. Where
    # its later pages are, another file may have been.
    filefrag -v "disk/db/$(sed -n 's/^file: //p' report)" | awk '$1 ~ /^[0-9]+:$/ {
        gsub("[.:]", " ")
        if ($2 < 1024) print "guest: extent", $2, $4, ($2 + $6 > 1024 ? 1024 - $2 : $6)
    }'
    say checked
}

if [ -n "$MAKE" ]; then
    eval "$MAKE" && create
else
    mount $DISK disk && start && check
fi && if [ -n "$WORK" ]; then
    for number in 1 2 3 4; do client "$number" & done
    flushed
    wait
else
    kill -INT $server
    wait
    say wrong checksums "$(pg_checksums --check disk/db | sed -n 's/^Bad checksums: *//p')"
fi
umount disk
