# The disks of `walvisor serve ublk` under Linux 6.12's own block layer: first what is said where ublk is missing, then
# what the kernel is told of each kind of disk, kills of the daemon under the oracle's load, and the images at the end.
# $KILLS is the number of kills; at least $EACH FLUSHes are answered before each.
say() { echo "job: $*"; }
# Runs a command that must fail, and prints its status and its message.
fails() {
    "$@" >out 2>err
    say "status $?: $(sed "s/process $daemon:/the daemon:/" err)"
}
# waits SECONDS COMMAND...: until the command succeeds.
waits() {
    until=$(($(uptime_seconds) + $1))
    shift
    until "$@"; do
        [ "$(uptime_seconds)" -lt $until ] || { say "in vain: $*"; cat ./*.log; exit 1; }
        sleep 0.05
    done
}
# serve NAME ARGUMENT...: starts a daemon, and waits for its disks.
serve() {
    name=$1
    shift
    : >"$name.served"
    walvisor serve ublk "$@" --metrics "$name.prom" >"$name.served" 2>"$name.log" &
    daemon=$!
    disks=$(echo "$*" | grep -o -e '--disk ' | wc -l)
    waits 60 is_served
}
is_served() {
    [ "$(wc -l <"$name.served")" = "$disks" ] && return
    kill -0 $daemon 2>/dev/null || { say "$name ended"; cat "$name.log"; exit 1; }
    return 1
}
stop() {
    kill -TERM $daemon
    wait $daemon
    say "$name: status $?"
    cat "$name.log"
}
devices() { ls /sys/block | grep -c ublkb; }

# What is missing.
rmmod ublk_drv
walvisor disk create a.img --size 64M
fails walvisor serve ublk --disk path=a.img
insmod "$(ls /modules/*ublk_drv.ko)"

# What the kernel is told.
tells() {
    queue=/sys/block/$1/queue
    say "$1: $(($(cat /sys/block/$1/size) / 2048)) MiB in blocks of $(cat $queue/logical_block_size)," \
        "$(cat $queue/write_cache), fua $(cat $queue/fua), read-only $(cat /sys/block/$1/ro)," \
        "$(ls /sys/block/$1/mq | wc -l) queues of $(cat /sys/block/$1/queue/nr_requests)," \
        "$(cat $queue/max_sectors_kb) KiB, discard $(cat $queue/discard_max_bytes)," \
        "zeroes $(cat $queue/write_zeroes_max_bytes)"
}
walvisor disk create b.img --size 8M
truncate -s 4M c.img
serve kinds --control control --disk-dir . --disk path=a.img,queues=2,queue-size=64 \
    --disk path=b.img,cache=writethrough,block-size=4096,queues=1 --disk path=c.img,backend=raw,readonly=on,queues=1
sed 's/^/job: /' kinds.served
for device in ublkb0 ublkb1 ublkb2; do tells $device; done
walvisor serve ublk --list | sed "s/process $daemon/the daemon/; s/^/job: /"
fails walvisor serve ublk --remove /dev/ublkb0
say "of root: $(sed -n 's/^CapEff:.//p' /proc/$daemon/status), filter $(sed -n 's/^Seccomp:.//p' /proc/$daemon/status)"
dd if=/dev/ublkb2 of=/dev/null bs=64k 2>/dev/null && say 'the raw disk can be read'
dd if=/dev/zero of=/dev/ublkb2 bs=4k count=1 oflag=direct 2>/dev/null || say 'and not written'

# The control socket.
walvisor ctl control pause --disk a.img >/dev/null
dd if=/dev/zero of=/dev/ublkb0 bs=4k count=1 oflag=direct 2>/dev/null &
held=$!
sleep 1
kill -0 $held && say 'a paused disk holds its requests'
walvisor ctl control resume --disk a.img >/dev/null
wait $held
say "resumed: status $?"
fails walvisor ctl control resize --disk b.img --size 16M
say "as before: $(blockdev --getsize64 /dev/ublkb1) bytes, image $(stat -c %s b.img)"
fails walvisor ctl control add-disk path=d.img
walvisor ctl control remove-disk c.img >/dev/null
say "removed: status $?, $(devices) left"
stop kinds
say "left: $(devices)"
walvisor disk resize b.img --size 16M >/dev/null
serve grown --disk path=b.img,queues=1
say "resized: $(blockdev --getsize64 /dev/ublkb0) bytes"
stop grown

# Kills under load.
walvisor disk create oracle.img --size 64M
mkdir oracle
at=$BASE/program
oracle() { exec "$at/loader" --library-path "$at" "$JOB/block-oracle" "$@"; }
spec=path=oracle.img,queues=2,queue-size=32
flushes() { cat oracle/flushes 2>/dev/null || echo 0; }
flushed() {
    kill -0 $load 2>/dev/null || { say "the oracle ended: $(cat oracle.out)"; exit 1; }
    [ "$(flushes)" -ge $target ]
}
serve first --disk $spec
oracle /dev/ublkb0 4 oracle >oracle.out 2>&1 &
load=$!
kill=0
while [ $kill -lt "$KILLS" ]; do
    kill=$((kill + 1)) target=$(($(flushes) + EACH))
    progress "kill $kill of $KILLS, $(flushes) FLUSHes"
    waits 60 flushed
    kill -KILL $daemon
    wait $daemon
    # Sometimes the device waits long, sometimes the kernel has not noticed yet.
    [ $((kill % 2)) = 0 ] && sleep 0.3
    serve "round-$((kill % 2))" --disk $spec
    grep -q 'at /dev/ublkb0$' "$name.served" || say "another device: $(cat "$name.served")"
done
target=$(($(flushes) + EACH))
waits 60 flushed
: >oracle/stop
wait $load
say "oracle: status $?"
cat oracle.out
len=$(stat -c %s oracle/expected)
head -c "$len" /dev/ublkb0 | cmp - oracle/expected && say 'the device holds what was written'
# Once more without anybody who writes, and then nobody comes back.
kill -KILL $daemon
wait $daemon
waits 10 sh -c 'walvisor serve ublk --list | grep -q waits'
walvisor serve ublk --list | sed 's/^/job: /'
fails walvisor serve ublk --disk $spec,block-size=4096
# One that is killed while it is on its way.
for delay in 0.2 0.5 1.0; do
    walvisor serve ublk --disk $spec >/dev/null 2>&1 &
    sleep $delay
    kill -KILL $!
    wait $!
done
serve last --disk path=oracle.img,cache=writethrough
head -c "$len" /dev/ublkb0 | cmp - oracle/expected && say 'and after another kill'
kill -KILL $daemon
wait $daemon
walvisor serve ublk --remove /dev/ublkb0 | sed 's/^/job: /'
say "left: $(devices)"
walvisor disk check oracle.img >/dev/null
say "check: status $?"
walvisor disk export oracle.img exported >/dev/null 2>&1
head -c "$len" exported | cmp - oracle/expected && say 'the image holds what was written'

# A disk whose answers a kill loses does not wait.
serve memory --disk backend=ram,size=1M,queues=1
kill -KILL $daemon
wait $daemon
waits 10 sh -c '[ "$(ls /sys/block | grep -c ublkb)" = 0 ]'
say 'a disk in memory is gone with its daemon'
serve memory --disk backend=ram,size=1M,queues=1
stop memory
say "left: $(devices) $(ls /dev | grep -c ublkc)"
