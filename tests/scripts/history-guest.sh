# A row of a database is deleted by mistake, and the daemon is killed. The file system and the database as they were before
# are mounted from a scratch disk, and the row comes back with a clone. Runs in user-mode Linux, whose kernel has the NBD
# client, in a directory of the machine; $WALVISOR is the program.
mkdir /mnt/files || exit
"$WALVISOR" disk create bank.img --size 64M || exit

# Serves a disk, and attaches it to the kernel.
serve() {
    : >served
    "$WALVISOR" serve nbd --disk "$1,socket=s" >served 2>daemon.log &
    daemon=$!
    until [ -s served ]; do
        kill -0 $daemon || { cat daemon.log; exit 1; }
        sleep 0.2
    done
    nbd-client -unix s /dev/nbd0 -N "$2" >attached 2>&1 && return
    cat attached
    exit 1
}

stop() {
    nbd-client -d /dev/nbd0 >/dev/null
    kill -TERM $daemon
    wait $daemon
    echo "guest: daemon: status $?"
    cat daemon.log
}

sql() { sqlite3 -bail -batch -cmd 'PRAGMA synchronous=EXTRA' "$@"; }
row() { echo "guest: row 7: $(sql /mnt/files/bank.db 'SELECT COALESCE(MAX(owner), "gone") FROM accounts WHERE id = 7')"; }
sums() { sha256sum bank.img bank.img.wal/*; }

serve path=bank.img bank.img
mkfs.ext4 -q -F /dev/nbd0 && mount -t ext4 /dev/nbd0 /mnt/files || exit 1
sql /mnt/files/bank.db "PRAGMA journal_mode=wal;
    CREATE TABLE accounts (id INTEGER PRIMARY KEY, owner TEXT NOT NULL, balance INTEGER NOT NULL);
    WITH RECURSIVE ids(id) AS (SELECT 0 UNION ALL SELECT id + 1 FROM ids WHERE id < 999)
        INSERT INTO accounts SELECT id, printf('owner %d', id), 1000 + id FROM ids;" >/dev/null || exit 1
row
then=$(date -u +%Y-%m-%dT%H:%M:%S.%NZ)
sql /mnt/files/bank.db 'DELETE FROM accounts WHERE id = 7' || exit 1
row
sql /mnt/files/bank.db 'UPDATE accounts SET balance = 0' || exit 1
kill -KILL $daemon
wait $daemon
echo "guest: killed: status $?"
umount -l /mnt/files
nbd-client -d /dev/nbd0 >/dev/null
sums >before

# The file system was in use, so its journal has to be replayed.
serve path=bank.img,at=time:$then bank.img
mount -t ext4 -o ro /dev/nbd0 /mnt/files 2>/dev/null
echo "guest: mounted without scratch: status $?"
stop
serve path=bank.img,at=time:$then,scratch=on bank.img
mount -t ext4 /dev/nbd0 /mnt/files || exit 1
row
echo "guest: integrity: $(sql /mnt/files/bank.db 'PRAGMA integrity_check')"
echo "guest: rows: $(sql /mnt/files/bank.db 'SELECT COUNT(*), SUM(balance) FROM accounts')"
sql /mnt/files/bank.db 'INSERT INTO accounts VALUES (5000, "new", 1)'
sync
echo "guest: rows: $(sql /mnt/files/bank.db 'SELECT COUNT(*), SUM(balance) FROM accounts')"
umount /mnt/files
e2fsck -fn /dev/nbd0 >e2fsck.log 2>&1
echo "guest: e2fsck: status $?"
stop
sums >after
cmp before after && echo 'guest: the disk and its log are as they were'

"$WALVISOR" disk clone bank.img back.img --at time:$then >/dev/null 2>&1
echo "guest: clone: status $?"
serve path=back.img back.img
mount -t ext4 /dev/nbd0 /mnt/files || exit 1
row
echo "guest: rows: $(sql /mnt/files/bank.db 'SELECT COUNT(*), SUM(balance) FROM accounts')"
umount /mnt/files
stop
