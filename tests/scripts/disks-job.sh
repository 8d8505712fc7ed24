# A guest whose root file system is a disk with a log, with one more disk for each use that Linux makes of disks.
# Three boots: the first uses everything and ends with a reboot, the other two check the kept files, and panic. At
# each step of the first boot the job saves the counters, and grows a disk as the answer for which the guest waits.
walvisor disk import root.img "$IMAGES/root.ext4" --log log >import.log 2>&1 || cat import.log
# mkfs.xfs makes no file system smaller than 300 MiB.
for disk in ext4:64M bulk:64M xfs:320M step:8M ro:8M; do
    walvisor disk create ${disk%:*}.img --size ${disk#*:} --log log || exit
done
# This disk has a log of its own, so that the log's counters count only this disk.
walvisor disk create mode.img --size 32M || exit
truncate -s 16M raw.img

# start NAME CPUS END SCRIPT...: boots a guest that runs the scripts in sequence, and that ends as END says.
start() {
    boot=$1 cpus=$2 end=$3
    shift 3
    {
        echo "CRASH=$boot; cat >/run/kept <<'LIST'"
        cat kept
        echo LIST
        cat "$@"
    } >guest.sh
    guest_initrd initrd guest.sh disks
    start_guest $boot --kernel "$IMAGES/vmlinux" --initrd initrd --cpus $cpus --memory 512M --control ctl \
        --cmdline "console=ttyS0 quiet mitigations=off panic=-1 reboot=t root=/dev/vda guest.end=$end" --metrics "$RESULTS/$boot.prom" \
        --disk path=root.img,log=log,transport=mmio,serial=root,queues=$cpus \
        --disk path=step.img,log=log,transport=mmio,serial=step \
        --disk path=mode.img,transport=mmio,serial=mode,queues=$cpus \
        --disk path=raw.img,backend=raw,cache=writethrough,transport=mmio,serial=raw \
        --disk path=ext4.img,log=log,transport=pci,serial=ext4,queues=$cpus \
        --disk path=bulk.img,log=log,transport=pci,serial=bulk,queues=$cpus,queue-size=1024 \
        --disk path=xfs.img,log=log,transport=pci,serial=xfs,queues=$cpus,block-size=4096 \
        --disk path=ro.img,log=log,readonly=on,transport=pci,serial=ro
}

# keep NAME: adds the files that the guest of this name made durable to the list for later boots.
keep() { tr -d '\r' <"$RESULTS/$1.log" | sed -n 's/^guest: kept \(.* [0-9a-f]\{64\}\)$/\1/p' >>kept; }

: >kept
progress 'boot 1: what Linux does with disks'
start all 2 reboot "$JOB/functions.sh" "$JOB/guest.sh"
mebibytes=8
# answer STEP [DISK]: with DISK, first copies the log into the image of DISK, whose size then shows the space that
# discards freed.
answer() {
    wait_line all "guest: at $1\\." 120 || { spoken all; exit 1; }
    if [ -n "$2" ]; then
        walvisor ctl ctl checkpoint --disk "$2" >/dev/null || echo "job: no checkpoint of $2"
        echo "job: at $1 $2.img has $(du -k "$2.img" | cut -f1) KiB"
    fi
    walvisor ctl ctl stats --json >"$RESULTS/$1.json" || echo "job: no stats"
    mebibytes=$((mebibytes + 1))
    walvisor ctl ctl resize --disk step --size ${mebibytes}M >/dev/null || echo "job: no resize"
}
for name in start written-back switched written-through switched-back written-back-again flushed; do answer $name; done
for name in filled discarded; do answer $name bulk; done
for name in ext4 xfs; do
    answer $name-filled $name
    answer $name-trimmed $name
done
for name in raw-start raw-through raw-back; do answer $name; done
for name in counted batched-randread batched-randwrite single-randrw; do answer $name; done
wait_guest all 120
echo "job: reboot: status $?"
echo "job: raw sum $(head -c 1048576 raw.img | sha256sum | cut -d' ' -f1)"
keep all

for panic in told silent; do
    progress "a boot that panics ($panic)"
    start $panic 1 poweroff "$JOB/functions.sh" "$JOB/crash.sh"
    wait_guest $panic 120
    status=$?
    # If the guest crashed in emulation before its panic, this line is missing.
    grep -q 'guest: job exit in a panic' "$RESULTS/$panic.log" || { spoken $panic; exit 1; }
    echo "job: $panic panic: status $status"
    keep $panic
done
for name in root ext4 xfs bulk step ro; do
    walvisor disk check $name.img --log log >/dev/null
    echo "job: check of $name: status $?"
done
walvisor disk check mode.img >/dev/null
echo "job: check of mode: status $?"
# A disk is a plain image once the log is copied to it, so this machine's own tools can read the files that the last
# guest kept.
for name in root ext4; do
    # The log may hold records of its other disks too.
    others=$(for other in root ext4 xfs bulk step ro; do [ $other = $name ] || echo "--detached $other.img"; done)
    walvisor disk checkpoint $name.img --log log $others >/dev/null || echo "job: no checkpoint of $name"
    case $name in root) file=/before-silent ;; ext4) file=/mnt/ext4/before-silent ;; esac
    e2fsck -fp $name.img >e2fsck.log 2>&1
    # Status 1: e2fsck replayed the journal, and thus changed the file system.
    [ $? -le 1 ] || cat e2fsck.log
    sum=$(debugfs -R 'cat /before-silent' $name.img 2>/dev/null | sha256sum | cut -d' ' -f1)
    grep -q "^$file $sum\$" kept && echo "job: $name.img has what was kept last"
done
exit 0
