# MariaDB on $DISK in user-mode Linux. Variables: DISK, ATOMIC (the program of atomic.c, if the kernel knows atomic
# writes), MAKE (in the first boot only: the commands that make the file system and mount it at disk), SEED, and WORK (if
# set, clients work until the power is cut). It runs in an empty directory in memory.
say() { echo "guest: $*"; }
sql() { mariadb --defaults-file=my.cnf --batch --skip-column-names "$@"; }
export TMPDIR=$PWD/tmp
mkdir disk tmp

# MariaDB writes pages all the time, each directly to the disk, once, and nowhere else before. So the settings are a
# small buffer pool that should hold no changed pages, a small redo log, and no doublewrite buffer.
cat >my.cnf <<END
[mariadbd]
user=root
datadir=$PWD/disk/db
socket=$PWD/socket
pid-file=$PWD/pid
tmpdir=$TMPDIR
log-error=$PWD/error.log
skip-networking
wsrep-node-address=127.0.0.1
innodb-doublewrite=OFF
innodb-flush-log-at-trx-commit=1
log-bin=$PWD/disk/db/binlog
sync-binlog=1
innodb-flush-method=O_DIRECT
innodb-buffer-pool-size=8M
innodb-buffer-pool-size-max=64M
innodb-log-file-size=4M
innodb-max-dirty-pages-pct=0.001
innodb-max-dirty-pages-pct-lwm=0.001
innodb-io-capacity=1000
[client]
socket=$PWD/socket
END

start() {
    mariadbd --defaults-file=my.cnf &
    until [ -S socket ] && sql -e 'DO 0' 2>/dev/null; do
        kill -0 $! 2>/dev/null || { say no server; sed 's/^/guest: log: /' error.log; return 1; }
        sleep 0.2
    done
    say server $(sql -e 'SELECT @@innodb_doublewrite, @@innodb_flush_method, @@innodb_flush_log_at_trx_commit, @@sync_binlog, @@innodb_page_size')
}

# Makes the accounts, 16 rows per page, and the ledger: for each client the amounts that it moved between accounts.
create() {
    mkdir disk/db
    mariadb-install-db --defaults-file=my.cnf --skip-test-db --auth-root-authentication-method=normal >install.log 2>&1 ||
        sed 's/^/guest: install: /' install.log
    start && sql <<END && sync && say created
CREATE DATABASE bank; USE bank;
CREATE TABLE accounts (id INT PRIMARY KEY, balance BIGINT NOT NULL, note VARCHAR(1000) NOT NULL) ENGINE=InnoDB;
CREATE TABLE ledger (client INT, number INT, source INT NOT NULL, target INT NOT NULL, amount INT NOT NULL,
    PRIMARY KEY (client, number)) ENGINE=InnoDB;
INSERT INTO accounts SELECT seq, 1000, REPEAT('-', 900) FROM seq_0_to_8191;
END
}

# A client prints each commit once the server has answered it. The test outside of this machine keeps these lines as
# its journal.
client() {
    last=$(sql bank -e "SELECT COALESCE(MAX(number), 0) FROM ledger WHERE client = $1")
    awk -v client="$1" -v number="$last" -v seed="$SEED$1" 'BEGIN {
        srand(seed)
        while (1) {
            number++
            source = int(rand() * 8192); target = (source + 1 + int(rand() * 8191)) % 8192; amount = int(rand() * 100)
            print "BEGIN;"
            printf "INSERT INTO ledger VALUES (%d, %d, %d, %d, %d);\n", client, number, source, target, amount
            printf "UPDATE accounts SET balance = balance + IF(id = %d, %d, %d), note = REPEAT(CHAR(%d), 900) WHERE id IN (%d, %d);\n",
                source, -amount, amount, 97 + number % 26, source, target
            printf "COMMIT;\nSELECT \"guest: acknowledged %d %d\";\n", client, number
        }
    }' | sql --unbuffered bank 2>&1
}

# Pages written so far, by the page cleaner or to free space in the buffer pool.
flushed() {
    sql -e "SELECT CAST(SUM(variable_value) AS INT) FROM information_schema.global_status
        WHERE variable_name IN ('Innodb_buffer_pool_pages_flushed', 'Innodb_buffer_pool_pages_LRU_flushed')"
}

check() {
    grep -q 'Starting crash recovery' error.log && say recovered
    sql -e 'CHECK TABLE bank.accounts, bank.ledger EXTENDED' | while read -r table _ kind text; do
        say check "$table $kind $text"
    done
    mariadb-check --defaults-file=my.cnf --all-databases --silent 2>&1 | sed 's/^/guest: damaged: /'
    # Each balance must be the first balance plus the amounts in the ledger.
    say wrong balances "$(sql bank -e 'SELECT COUNT(*) FROM accounts LEFT JOIN (SELECT id, SUM(amount) AS moved FROM
        (SELECT source AS id, -amount AS amount FROM ledger UNION ALL SELECT target, amount FROM ledger) AS moves GROUP BY id) AS moves
        USING (id) WHERE balance <> 1000 + COALESCE(moved, 0)')", accounts "$(sql bank -e 'SELECT COUNT(*) FROM accounts')"
    sql bank -e 'SELECT CONCAT_WS(" ", "guest: ledger", client, COUNT(*), MIN(number), MAX(number)) FROM ledger GROUP BY client'
    grep -iE 'corrupt|torn|checksum|failed to read|\[ERROR\]' error.log | sed 's/^/guest: alarm: /'
    [ -z "$ATOMIC" ] || "$ATOMIC" --unit disk/db/bank/accounts.ibd
    # Prints the locations of the table's pages on the disk, in blocks of 4 KiB.
    filefrag -v disk/db/bank/accounts.ibd | awk '$1 ~ /^[0-9]+:$/ { gsub("[.:]", " "); print "guest: extent", $2, $4, $6 }'
    say checked
}

if [ -n "$MAKE" ]; then
    eval "$MAKE" && create
else
    mount $DISK disk && start && check
fi && if [ -n "$WORK" ]; then
    before=$(flushed)
    for number in 1 2 3 4; do client "$number" & done
    until [ "$(flushed)" -ge $((before + 100)) ]; do sleep 0.1; done
    say flushed
    wait
else
    sql -e SHUTDOWN
    wait
    say wrong checksums "$(for file in $(find disk/db -name '*.ibd' -o -name 'ibdata*'); do
        innochecksum "$file" >innochecksum.log 2>&1 || echo "$file"
    done | wc -l)"
fi
umount disk
