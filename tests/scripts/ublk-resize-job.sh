# A disk of `walvisor serve ublk` that grows while it is used. Runs on a machine with a kernel whose ublk can resize.
walvisor disk create a.img --size 8M || exit
dd if=/dev/urandom of=bytes bs=1M count=16 2>/dev/null
# serve: starts the daemon, and waits for its disk.
serve() {
    : >served
    walvisor serve ublk --control control --disk path=a.img >served 2>log &
    daemon=$!
    until [ -s served ]; do
        kill -0 $daemon 2>/dev/null || { cat log; exit 1; }
        sleep 0.1
    done
}
say() { echo "job: $1: $(blockdev --getsize64 /dev/ublkb0) bytes"; }
serve
say served
exec 3</dev/ublkb0
walvisor ctl control resize --disk a.img --size 16M >/dev/null || exit
say 'resized while open'
exec 3<&-
dd if=bytes of=/dev/ublkb0 bs=64k oflag=direct conv=fsync 2>/dev/null
kill -9 $daemon
wait $daemon
serve
say 'after a kill'
dd if=/dev/ublkb0 bs=64k iflag=direct 2>/dev/null | cmp - bytes && echo 'job: read back'
kill -TERM $daemon
wait $daemon
echo "job: daemon: status $?"
cat log
