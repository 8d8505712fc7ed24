# SQLite on $DISK in user-mode Linux: a database with a write-ahead log, and one with a rollback journal.
# Variables: DISK, MAKE (in the first boot only: the commands that make the file system and mount it at disk), SEED, and
# WORK (if set, clients work until the power is cut). It runs in an empty directory in memory.
say() { echo "guest: $*"; }
# FULL is not enough with a rollback journal: the commit is the journal's removal, and only EXTRA syncs the directory
# after it.
sql() { sqlite3 -bail -batch -cmd 'PRAGMA synchronous=EXTRA' "$@"; }
mkdir disk

# The expected content of each row is known, so that the check finds a torn row.
create() {
    for journal in wal delete; do
        sql disk/$journal.db "PRAGMA journal_mode=$journal;
            CREATE TABLE ledger (number INTEGER PRIMARY KEY, note TEXT NOT NULL);
            CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL, note TEXT NOT NULL);
            WITH RECURSIVE ids(id) AS (SELECT 0 UNION ALL SELECT id + 1 FROM ids WHERE id < 999)
                INSERT INTO accounts SELECT id, 1000, printf('%.*c', 500, '-') FROM ids;" >/dev/null
    done
    sync
    say created
}

# A client prints each commit once it has returned. The test outside of this machine keeps these lines as its journal.
client() {
    last=$(sql disk/$1.db 'SELECT COALESCE(MAX(number), 0) FROM ledger')
    awk -v journal="$1" -v number="$last" -v seed="$SEED" 'BEGIN {
        srand(seed)
        while (1) {
            number++
            source = int(rand() * 1000); target = (source + 1 + int(rand() * 999)) % 1000; amount = int(rand() * 100)
            printf "BEGIN;\nINSERT INTO ledger VALUES (%d, printf(\"%%.*c\", 600, \"%c\"));\n", number, 97 + number % 26
            printf "UPDATE accounts SET balance = balance - %d WHERE id = %d;\n", amount, source
            printf "UPDATE accounts SET balance = balance + %d WHERE id = %d;\n", amount, target
            printf "COMMIT;\nSELECT \"guest: acknowledged %s %d\";\n", journal, number
        }
    }' | sql disk/$1.db 2>&1
}

check() {
    for journal in wal delete; do
        # Lists the journals that a writer has left behind.
        ls disk/$journal.db-wal disk/$journal.db-journal 2>/dev/null | sed 's|disk/|guest: left |'
        say check $journal "$(sql disk/$journal.db 'PRAGMA integrity_check')"
        say mode $journal "$(sql disk/$journal.db 'PRAGMA journal_mode')" "$(sql disk/$journal.db 'PRAGMA synchronous')"
        say wrong in $journal "$(sql disk/$journal.db "SELECT (SELECT SUM(balance) - 1000000 FROM accounts),
            (SELECT COUNT(*) FROM ledger WHERE note <> printf('%.*c', 600, char(97 + number % 26)))")"
        sql disk/$journal.db "SELECT 'guest: ledger $journal ' || COUNT(*) || ' ' || MIN(number) || ' ' || MAX(number) FROM ledger"
    done
    say checked
}

if [ -n "$MAKE" ]; then
    eval "$MAKE" && create
else
    mount $DISK disk && check
fi && if [ -n "$WORK" ]; then
    for journal in wal delete; do client $journal & done
    wait
fi
umount disk
