# Sets the wall clock while disks commit. Runs on a Debian machine of its own, whose clock it may set. The job
# measures waits in processor time: a wait that ends too early is repeated at once and for ever, which takes much of
# it.
(cd / && cpio -idu <"$IMAGES/initramfs-fio.cpio" 2>/dev/null)
base64 -d "$JOB/leap.base64" >leap && chmod +x leap || exit 1

# ticks PID: processor time so far, in 1/100 s.
ticks() { echo $(($(cut -d' ' -f14,15 "/proc/$1/stat" | tr ' ' +))); }

# set_clocks_while NAME: sets the clock forward by a day, back by two days, and through a leap second, until the file
# NAME exists.
set_clocks_while() {
    started=$(date +%s) began=$(uptime_seconds) steps=0 leaps=0
    until [ -e "$1" ] && [ $steps -ge 4 ]; do
        date -s "@$(($(date +%s) + 86400))" >/dev/null && steps=$((steps + 1))
        sleep 0.5
        date -s "@$(($(date +%s) - 172800))" >/dev/null && steps=$((steps + 1))
        sleep 0.5
        # Five seconds before the next midnight: the commands before the leap second may take some of them.
        date -s "@$(($(date +%s) / 86400 * 86400 + 86395))" >/dev/null
        tai=$(./leap insert) || exit 1
        sleep 7
        leaps=$((leaps + $(./leap clear) - tai))
    done
    date -s "@$((started + $(uptime_seconds) - began))" >/dev/null
    [ $leaps -ge 1 ] && echo "job: $clock_of: the clock was set and had a leap second"
}

# idle PID: the processor time that it takes in 3 s without any requests.
idle() {
    idle_before=$(ticks $1)
    sleep 3
    echo $(($(ticks $1) - idle_before))
}

progress 'the wall clock is set: serve'
for disk in waiting adaptive; do walvisor disk create $disk.img --size 32M || exit; done
: >clocks
# The commit groups of this disk wait for more flushes than the clients have in flight.
walvisor serve nbd --disk path=waiting.img,socket="$WORK/c",commit-wait-usec=3000,commit-wait-count=64 \
    --disk path=adaptive.img,socket="$WORK/c" >clocks 2>clocks.log &
daemon=$!
until [ "$(wc -l <clocks)" = 2 ]; do
    kill -0 $daemon || { cat clocks.log; exit 1; }
    sleep 0.2
done
nbd-client -unix "$WORK/c" /dev/nbd3 -N waiting.img -C 2 >attached 2>&1 &&
    nbd-client -unix "$WORK/c" /dev/nbd4 -N adaptive.img -C 2 >>attached 2>&1 || { cat attached; exit 1; }

# commits: runs the same number of commits each time.
commits() {
    fio --rw=randwrite --bs=4k --direct=1 --ioengine=psync --fsync=1 --size=8M --number_ios=300 --numjobs=2 --eta=never \
        --name=waiting --filename=/dev/nbd3 --name=adaptive --filename=/dev/nbd4 >clock-fio.log 2>&1
    clock_status=$?
    [ $clock_status = 0 ] || cat clock-fio.log
    echo "job: serve: commits: status $clock_status"
}

clock_of=serve
commits
quiet_idle=$(idle $daemon) before=$(ticks $daemon)
commits
quiet=$(($(ticks $daemon) - before)) before=$(ticks $daemon)
{ commits; touch committed; } &
set_clocks_while committed
wait $!
stepped=$(($(ticks $daemon) - before))
echo "clock: serve quiet $quiet stepped $stepped idle $quiet_idle $(idle $daemon)"
# Fast clients may have committed everything between two steps of the clock. So commit again a day later, and two days
# before that.
date -s "@$(($(date +%s) + 86400))" >/dev/null
commits
date -s "@$(($(date +%s) - 172800))" >/dev/null
commits
date -s "@$(($(date +%s) + 86400))" >/dev/null
nbd-client -d /dev/nbd3 >/dev/null
nbd-client -d /dev/nbd4 >/dev/null
# The daemon is killed like in a crash, so that all commits are still in the log.
kill -KILL $daemon
wait $daemon
for disk in waiting adaptive; do
    walvisor log dump $disk.img.wal --json >"$RESULTS/$disk.json"
    echo "job: $disk: dump: status $?"
    walvisor disk check $disk.img >/dev/null
    echo "job: $disk: check: status $?"
done

progress 'the wall clock is set: run'
walvisor disk create clock.img --size 32M || exit
guest_initrd initrd-clock "$JOB/clock-guest.sh"
start_guest clock --kernel "$IMAGES/vmlinux" --initrd initrd-clock --cpus 1 --memory 512M \
    --cmdline 'console=ttyS0 quiet panic=-1 reboot=t' \
    --disk path=clock.img,transport=mmio,commit-wait-usec=3000,commit-wait-count=64
clock_of=run vmm=$(cat "$WORK/clock.pid")
wait_line clock 'guest: commits 1' 60 || { spoken clock; exit 1; }
before=$(ticks $vmm)
wait_line clock 'guest: commits 2' 60 || { spoken clock; exit 1; }
quiet=$(($(ticks $vmm) - before)) before=$(ticks $vmm)
# Runs the same amount of work as before, whatever the guest did meanwhile.
{ wait_line clock 'guest: commits 3' 120; touch ended; } &
set_clocks_while ended
wait $!
echo "clock: run quiet $quiet stepped $(($(ticks $vmm) - before)) idle 0 $(idle $vmm)"
wait_guest clock 120
echo "job: run: status $?"
