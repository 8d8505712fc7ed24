# The clock is set while disks of `walvisor serve nbd` commit. Runs in user-mode Linux, in a directory of the
# machine; $WALVISOR is the program. Its first part is clock-functions.sh.
walvisor() { "$WALVISOR" "$@"; }
for disk in waiting adaptive; do walvisor disk create $disk.img --size 32M || exit; done
: >served
# The commit groups of this disk wait for more flushes than the clients have in flight.
"$WALVISOR" serve nbd --disk path=waiting.img,socket=s,commit-wait-usec=3000,commit-wait-count=64 \
    --disk path=adaptive.img,socket=s >served 2>daemon.log &
daemon=$!
until [ "$(wc -l <served)" = 2 ]; do
    kill -0 $daemon || { cat daemon.log; exit 1; }
    sleep 0.2
done
nbd-client -unix s /dev/nbd3 -N waiting.img -C 2 >attached 2>&1 &&
    nbd-client -unix s /dev/nbd4 -N adaptive.img -C 2 >>attached 2>&1 || { cat attached; exit 1; }

# commits NUMBER: each of two clients of each disk commits so often.
commits() {
    fio --rw=randwrite --bs=4k --direct=1 --ioengine=psync --fsync=1 --size=8M --number_ios=$1 --numjobs=2 --eta=never \
        --name=waiting --filename=/dev/nbd3 --name=adaptive --filename=/dev/nbd4 >fio.log 2>&1
    commits_status=$?
    [ $commits_status = 0 ] || cat fio.log
    echo "guest: commits: status $commits_status"
}

clock_of='guest: serve'
commits 100
quiet_idle=$(idle $daemon) before=$(ticks $daemon)
commits 100
quiet=$(($(ticks $daemon) - before)) before=$(ticks $daemon)
{ commits 100; touch committed; } &
set_clocks_while committed
wait $!
stepped=$(($(ticks $daemon) - before))
echo "guest: serve quiet $quiet stepped $stepped idle $quiet_idle $(idle $daemon)"
# Fast clients may have committed everything between two steps of the clock. So commit again a day later, and a day before
# the start.
date -s "@$(($(date +%s) + 86400))" >/dev/null
commits 300
date -s "@$(($(date +%s) - 172800))" >/dev/null
commits 300
date -s "@$(($(date +%s) + 86400))" >/dev/null
nbd-client -d /dev/nbd3 >/dev/null
nbd-client -d /dev/nbd4 >/dev/null
# The daemon is killed like in a crash, so that all commits are still in the log.
kill -KILL $daemon
wait $daemon
for disk in waiting adaptive; do
    walvisor log dump $disk.img.wal --json >$disk.json
    echo "guest: $disk: dump: status $?"
    walvisor disk check $disk.img >/dev/null
    echo "guest: $disk: check: status $?"
done
