# Boot 1: how Linux sees the disks, and what the disks do when Linux uses all their features.
STEP=$(device step) MODE=$(device mode) BULK=$(device bulk) EXT4=$(device ext4) XFS=$(device xfs) RAW=$(device raw) RO=$(device ro)
echo "guest: processors $(nproc), root $(mount | grep ' / ' | cut -d' ' -f1-5)"
for serial in root step mode bulk ext4 xfs raw ro; do
    name=$(device $serial)
    queue=/sys/block/$name/queue
    # There is no udev here: lsblk takes all values from the kernel.
    echo "guest: lsblk $serial $(lsblk -bdno SIZE,RO,LOG-SEC,PHY-SEC,MIN-IO,DISC-GRAN,DISC-MAX,RQ-SIZE "/dev/$name" | tr -s ' ')"
    echo "guest: blockdev $serial $(/bin/blockdev --getsize64 --getro --getss --getpbsz --getiomin --getalignoff /dev/$name | tr '\n' ' ')"
    echo "guest: queue $serial $(cat $queue/write_cache), fua $(cat $queue/fua), cache_type $(cat /sys/block/$name/cache_type)," \
        "$(ls /sys/block/$name/mq | wc -l) queues, write_zeroes_max_bytes $(cat $queue/write_zeroes_max_bytes)"
done

step start
writes() { dd if=/dev/zero of="/dev/$MODE" bs=4096 count=64 oflag=direct "$@" 2>/dev/null || echo 'guest: dd failed'; }
writes
step written-back
echo 'write through' >"/sys/block/$MODE/cache_type" || echo 'guest: not switched'
echo "guest: switched to $(cat "/sys/block/$MODE/queue/write_cache")"
step switched
writes conv=fsync
step written-through
echo 'write back' >"/sys/block/$MODE/cache_type" || echo 'guest: not switched'
echo "guest: switched to $(cat "/sys/block/$MODE/queue/write_cache")"
step switched-back
writes
step written-back-again
writes conv=fsync
step flushed

# Discarded or zeroed ranges must read as zeros, and the ranges beside them as before.
dd if=/dev/urandom of=/run/pattern bs=1M count=6 2>/dev/null
dd if=/run/pattern of="/dev/$BULK" bs=1M oflag=direct conv=fsync 2>/dev/null || echo 'guest: dd failed'
step filled
/bin/blkdiscard -o 1M -l 2M "/dev/$BULK"
echo "guest: blkdiscard: status $?"
/bin/blkdiscard -z -o 4M -l 1M "/dev/$BULK"
echo "guest: blkdiscard -z: status $?"
/bin/blkdiscard -s -o 0 -l 1M "/dev/$BULK" 2>/dev/null
echo "guest: blkdiscard -s: status $?"
for hole in 1:2 4:1; do
    dd if=/dev/zero of=/run/pattern bs=1M seek=${hole%:*} count=${hole#*:} conv=notrunc 2>/dev/null
done
[ "$(direct_sum "/dev/$BULK" 0 6)" = "$(file_sum /run/pattern)" ] && echo 'guest: discarded ranges are zero'
step discarded
[ "$(direct_sum "/dev/$BULK" 0 6)" = "$(file_sum /run/pattern)" ] && echo 'guest: and stay so behind a checkpoint'
rm /run/pattern

for pair in ext4:$EXT4 xfs:$XFS; do
    type=${pair%:*} name=${pair#*:}
    mkdir -p /mnt/$type
    case $type in ext4) mkfs.ext4 -q -F /dev/$name ;; xfs) mkfs.xfs -q -f /dev/$name ;; esac
    echo "guest: mkfs.$type: status $?"
    mount -t $type /dev/$name /mnt/$type || exit 1
    keep /mnt/$type/kept 500
    dd if=/dev/urandom of=/mnt/$type/dropped bs=1M count=4 conv=fsync 2>/dev/null || exit 1
    step $type-filled
    rm /mnt/$type/dropped
    sync
    /bin/fstrim /mnt/$type
    echo "guest: fstrim $type: status $?"
    step $type-trimmed
    umount /mnt/$type
    case $type in ext4) e2fsck -fn /dev/$name ;; xfs) xfs_repair -n /dev/$name ;; esac >/tmp/check 2>&1
    status=$?
    echo "guest: check of $type: status $status"
    [ $status = 0 ] || cat /tmp/check
done

echo "guest: raw is $(cat "/sys/block/$RAW/queue/write_cache")"
verify() {
    fio --name=verify --filename="/dev/$RAW" --rw=randwrite --bs=4k --size=1M --direct=1 --ioengine=libaio --iodepth=8 \
        --fsync=16 --verify=crc32c --do_verify=1 --verify_fatal=1 --eta=never --output=/tmp/fio
    echo "guest: fio verify on raw: status $?"
}
step raw-start
verify
step raw-through
echo 'write back' >"/sys/block/$RAW/cache_type" || echo 'guest: not switched'
verify
step raw-back
/bin/blkdiscard -o 256K -l 512K "/dev/$RAW"
echo "guest: blkdiscard on raw: status $?"
echo "guest: raw sum $(direct_sum "/dev/$RAW" 0 1)"

dd if=/dev/zero of="/dev/$RO" bs=4096 count=1 oflag=direct 2>/dev/null && echo 'guest: wrote on a read-only disk'
[ "$(direct_sum "/dev/$RO" 0 2)" = "$(head -c 2097152 /dev/zero | sha256sum | cut -d' ' -f1)" ] && echo 'guest: ro is read'

# Requests at a depth of 32: submitted in batches of 16, as io_uring programs and databases do, and one by one. One fio
# runs its jobs on both disks, one after the other: in emulation its start takes most of its time.
count() {
    fio --rw=$1 --bs=4k --size=24M --io_size=4M --direct=1 --ioengine=libaio --iodepth=32 --randseed=1 $2 --eta=never --output=/tmp/fio \
        --name=mode --filename="/dev/$MODE" --name=bulk --stonewall --filename="/dev/$BULK" || echo 'guest: fio failed'
}
batched='--iodepth_batch_submit=16 --iodepth_batch_complete_min=8 --iodepth_batch_complete_max=32'
step counted
count randread "$batched"
step batched-randread
count randwrite "$batched"
step batched-randwrite
count randrw ''
step single-randrw
keep /kept 500
