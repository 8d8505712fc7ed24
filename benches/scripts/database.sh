# MariaDB, PostgreSQL and SQLite in user-mode Linux over the files of its host. Before this script come DISKS, the names
# of /dev/vda, /dev/vdb, ... (raw, wal, and single: wal, with MariaDB's doublewrite buffer off), SERVERS (which of mariadb,
# postgresql and sqlite) and POSTGRESQL (a directory with db, a new cluster, and direct.so, which makes the server open
# its tables with O_DIRECT). The script takes jobs from the console, one per line: ENGINE DISK CLIENTS COMMITS. It prints
# `guest: ready`, waits for a line, does the job and prints `guest: sample: SECONDS`. An error begins with
# `guest: failed: `. It runs in an empty directory in memory.
export TMPDIR=$PWD/tmp PATH=/usr/lib/postgresql/15/bin:$PATH PGUSER=postgres PGDATABASE=postgres
mkdir tmp
failed() { echo "guest: failed: $*"; exit; }
sql() { defaults=$1.cnf; shift; mariadb --defaults-file="$defaults" --batch --skip-column-names "$@"; }

# A small buffer pool that should hold no changed pages: MariaDB writes pages all the time, as if the database were
# larger than the memory.
config() {
    [ "$1" = single ] && doublewrite=OFF || doublewrite=ON
    cat >"$1.cnf" <<END
[mariadbd]
user=root
datadir=$PWD/$1/db
socket=$PWD/$1.socket
pid-file=$PWD/$1.pid
tmpdir=$TMPDIR
log-error=$PWD/$1.log
skip-networking
wsrep-node-address=127.0.0.1
innodb-doublewrite=$doublewrite
innodb-flush-log-at-trx-commit=1
log-bin=$PWD/$1/db/binlog
sync-binlog=1
innodb-flush-method=O_DIRECT
innodb-buffer-pool-size=8M
innodb-buffer-pool-size-max=64M
innodb-log-file-size=8M
innodb-max-dirty-pages-pct=0.001
innodb-max-dirty-pages-pct-lwm=0.001
innodb-io-capacity=1000
max-connections=50
[client]
socket=$PWD/$1.socket
END
}

# Each step prints a line, because a guest that is silent for too long counts as hung.
begin() {
    set -- vda vdb vdc
    for disk in $DISKS; do
        device=/dev/$1
        shift
        mkdir "$disk"
        # Clusters have the size of a page, so each page is one request.
        mkfs.ext4 -q -O bigalloc -C 16384 "$device" && mount "$device" "$disk" || failed "$device cannot be mounted"
    done
    echo 'the file systems are there'
    for server in $SERVERS; do
        begin_$server
    done
    sync
}

begin_mariadb() {
    for disk in $DISKS; do
        config $disk
    done
    mkdir raw/db
    mariadb-install-db --defaults-file=raw.cnf --skip-test-db --auth-root-authentication-method=normal >install.log 2>&1 ||
        failed "mariadb-install-db: $(tail -n 1 install.log)"
    echo 'a server is installed'
    cp -a raw/db wal/ && cp -a raw/db single/ || failed 'the server has no room'
    echo 'on every disk'
    for disk in $DISKS; do
        mariadbd --defaults-file=$disk.cnf 2>/dev/null &
    done
    for disk in $DISKS; do
        tries=0
        until sql $disk -e 'DO 0' 2>/dev/null; do
            [ $((tries += 1)) -lt 1000 ] || failed "mariadbd: $(tail -n 1 $disk.log)"
            [ $((tries % 100)) != 0 ] || echo "still no server on $disk"
            sleep 0.2
        done
        echo "the server on $disk is up"
        sql $disk <<END || failed 'the tables cannot be made'
CREATE DATABASE bank; USE bank;
CREATE TABLE accounts (id INT PRIMARY KEY, balance BIGINT NOT NULL, note VARCHAR(1000) NOT NULL) ENGINE=InnoDB;
INSERT INTO accounts SELECT seq, 1000, REPEAT('-', 900) FROM seq_0_to_8191;
END
        echo "the tables on $disk are made"
    done
}

# Starts the server of a directory in which a database cluster is. It does not run as root.
postgres_in() {
    log=$1.pg/log
    mkdir $1.pg && chown nobody $1.pg
    setpriv --reuid=nobody --regid=nogroup --clear-groups env $2 postgres -D $1/pg -k "$PWD/$1.pg" >$log 2>&1 </dev/null &
    until grep -q 'ready to accept connections' $log; do
        kill -0 $! 2>/dev/null || failed "postgres: $(tail -n 1 $log)"
        sleep 0.2
    done
    echo "PostgreSQL in $1 is up"
}

# The server's memory holds all tables, its log has room for a job, and nothing but a job's transactions writes.
begin_postgresql() {
    mkdir -m 1777 /dev/shm && mkdir memory && cp "$POSTGRESQL/direct.so" . && cp -r "$POSTGRESQL/db" memory/pg
    cat >>memory/pg/postgresql.conf <<END
listen_addresses = ''
autovacuum = off
checkpoint_timeout = 1h
min_wal_size = 64MB
END
    chown -R nobody memory/pg
    postgres_in memory
    pgbench --host="$PWD/memory.pg" --initialize --init-steps=dtGvp --quiet --scale=1 >pgbench.log 2>&1 ||
        failed "pgbench: $(tr "\n" " " <pgbench.log)"
    kill -INT $! && wait $!
    echo 'the tables are made'
    for disk in raw wal; do
        cp -a memory/pg $disk/ || failed 'the server has no room'
        postgres_in $disk LD_PRELOAD="$PWD/direct.so"
    done
}

begin_sqlite() {
    for disk in raw wal; do
        for journal in wal delete; do
            sqlite3 -bail -batch $disk/$journal.db "PRAGMA journal_mode=$journal;
                CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL, note TEXT NOT NULL);
                WITH RECURSIVE ids(id) AS (SELECT 0 UNION ALL SELECT id + 1 FROM ids WHERE id < 8191)
                    INSERT INTO accounts SELECT id, 1000, printf('%.*c', 500, '-') FROM ids;" >/dev/null || failed 'sqlite3'
            echo "$journal.db on $disk is made"
        done
    done
}

# Waits until MariaDB, if it is there, has no page left to write on the named disks.
settle() {
    for disk in $1; do
        [ -e $disk.cnf ] && until [ "$(sql $disk -e "RESET MASTER; SELECT variable_value FROM information_schema.global_status
            WHERE variable_name = 'innodb_buffer_pool_pages_dirty'")" = 0 ]; do
            sleep 0.1
        done
    done
    sync
}

# Sets full_page_writes on the named disk, and makes a checkpoint. The last line of psql.log is the setting that this
# checkpoint found, because the process that makes it may not have heard of the new one.
postgresql_checkpoint() {
    psql --host="$PWD/$1.pg" --no-psqlrc --quiet --tuples-only --no-align --set=ON_ERROR_STOP=1 >psql.log 2>&1 <<END
ALTER SYSTEM SET full_page_writes = $2;
SELECT pg_reload_conf();
TRUNCATE pgbench_history;
VACUUM pgbench_accounts;
CHECKPOINT;
SELECT CASE WHEN full_page_writes THEN 'on' ELSE 'off' END FROM pg_control_checkpoint();
END
}

# Makes the job ready.
prepare() {
    case $1 in
        postgresql-*)
            tries=0
            until postgresql_checkpoint "$2" "${1#*-}" && [ "$(tail -n 1 psql.log)" = "${1#*-}" ]; do
                [ $((tries += 1)) -lt 10 ] || failed "psql: $(tr "\n" " " <psql.log)"
            done
            ;;
        sqlite-*)
            awk -v count="$4" 'BEGIN { srand(); while (count-- > 0)
                printf "UPDATE accounts SET balance = balance + 1, note = printf(\"%%.*c\", 500, \"%c\") WHERE id = %d;\n",
                    97 + rand() * 26, rand() * 8192 }' >job.sql
            ;;
    esac
}

# One line, because mariadb-slap ends a statement at the end of a line.
update="INSERT INTO accounts VALUES (FLOOR(RAND() * 8192), 1, REPEAT('x', 900)) ON DUPLICATE KEY UPDATE \
balance = balance + 1, note = REPEAT(CHAR(97 + FLOOR(RAND() * 26)), 900)"

job() {
    case $1 in
        mariadb)
            mariadb-slap --defaults-file="$2.cnf" --csv --create-schema=bank --no-drop --query="$update" \
                --concurrency="$3" --number-of-queries="$4" >slap.csv 2>slap.log ||
                failed "mariadb-slap: $(cat slap.log)"
            echo "guest: sample: $(cut -d, -f3 slap.csv)"
            ;;
        postgresql-*)
            pgbench --host="$PWD/$2.pg" --no-vacuum --builtin=simple-update --protocol=prepared \
                --client="$3" --transactions=$(($4 / $3)) >pgbench.log 2>&1 || failed "pgbench: $(tr "\n" " " <pgbench.log)"
            grep -q "processed: $4/$4\$" pgbench.log || failed "pgbench: $(grep processed pgbench.log)"
            awk -v commits="$4" '$1 == "tps" { print "guest: sample:", commits / $3 }' pgbench.log
            ;;
        sqlite-*)
            from=$(date +%s%N)
            sqlite3 -bail -batch -cmd 'PRAGMA synchronous=EXTRA' "$2/${1#*-}.db" <job.sql >/dev/null || failed "$1"
            echo "guest: sample: $((($(date +%s%N) - from) / 1000))e-6"
            ;;
    esac
}

begin
used=$DISKS
echo guest: begun
while read -r engine place clients commits; do
    settle "$used"
    used=$place
    prepare "$engine" "$place" "$clients" "$commits"
    echo guest: ready
    read -r _
    job "$engine" "$place" "$clients" "$commits"
done
