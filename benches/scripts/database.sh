# MariaDB and SQLite in user-mode Linux over the files of its host: on /dev/vda (raw), /dev/vdb (wal), and /dev/vdc
# (single: wal, with the doublewrite buffer off). The script takes jobs from the console, one per line: ENGINE DISK
# CLIENTS COMMITS, or `quit`. It prints `ready`, waits for a line, does the job and prints `sample: SECONDS`. An error
# begins with `failed: `. It runs in an empty directory in memory.
disks='raw wal single'
export TMPDIR=$PWD/tmp
mkdir tmp
failed() { echo "failed: $*"; exit; }
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

begin() {
    for pair in vda:raw vdb:wal vdc:single; do
        device=/dev/${pair%:*} disk=${pair#*:}
        mkdir "$disk" && config "$disk"
        # Clusters have the size of a page, so each page is one request.
        mkfs.ext4 -q -O bigalloc -C 16384 "$device" && mount "$device" "$disk" || failed "$device cannot be mounted"
    done
    # Each step prints a line, because a guest that is silent for too long counts as hung.
    echo 'the file systems are there'
    mkdir raw/db
    mariadb-install-db --defaults-file=raw.cnf --skip-test-db --auth-root-authentication-method=normal >install.log 2>&1 ||
        failed "mariadb-install-db: $(tail -n 1 install.log)"
    echo 'a server is installed'
    cp -a raw/db wal/ && cp -a raw/db single/ || failed 'the server has no room'
    echo 'on every disk'
    for disk in $disks; do
        mariadbd --defaults-file=$disk.cnf 2>/dev/null &
    done
    for disk in $disks; do
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
    for disk in raw wal; do
        for journal in wal delete; do
            sqlite3 -bail -batch $disk/$journal.db "PRAGMA journal_mode=$journal;
                CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL, note TEXT NOT NULL);
                WITH RECURSIVE ids(id) AS (SELECT 0 UNION ALL SELECT id + 1 FROM ids WHERE id < 8191)
                    INSERT INTO accounts SELECT id, 1000, printf('%.*c', 500, '-') FROM ids;" >/dev/null || failed 'sqlite3'
            echo "$journal.db on $disk is made"
        done
    done
    sync
}

# Waits until the servers on the named disks have no page left to write.
settle() {
    for disk in $1; do
        until [ "$(sql $disk -e "RESET MASTER; SELECT variable_value FROM information_schema.global_status
            WHERE variable_name = 'innodb_buffer_pool_pages_dirty'")" = 0 ]; do
            sleep 0.1
        done
    done
    sync
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
            echo "sample: $(cut -d, -f3 slap.csv)"
            ;;
        sqlite-*)
            from=$(date +%s%N)
            sqlite3 -bail -batch -cmd 'PRAGMA synchronous=EXTRA' "$2/${1#*-}.db" <job.sql >/dev/null || failed "$1"
            echo "sample: $((($(date +%s%N) - from) / 1000))e-6"
            ;;
    esac
}

begin
used=$disks
echo begun
while read -r engine place clients commits; do
    [ "$engine" = quit ] && break
    settle "$used"
    used=$place
    awk -v count="$commits" 'BEGIN { srand(); while (count-- > 0)
        printf "UPDATE accounts SET balance = balance + 1, note = printf(\"%%.*c\", 500, \"%c\") WHERE id = %d;\n",
            97 + rand() * 26, rand() * 8192 }' >job.sql
    echo ready
    read -r _
    job "$engine" "$place" "$clients" "$commits"
done
