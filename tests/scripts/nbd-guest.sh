# The disks of `walvisor serve nbd` under the kernel's own NBD client: a file system and raw requests on one log, a
# kill of the daemon after fsyncs, and the content of the images at the end. Runs in user-mode Linux, whose kernel has
# the client, in a directory of the machine; $WALVISOR is the program.
walvisor() { "$WALVISOR" "$@"; }
walvisor disk create files.img --size 192M --log log || exit
walvisor disk create raw.img --size 64M --log log || exit

serve() {
    : >served
    "$WALVISOR" serve nbd --disk path=files.img,log=log,socket=s --disk path=raw.img,log=log,socket=s \
        --metrics metrics.prom >served 2>daemon.log &
    daemon=$!
    until [ "$(wc -l <served)" = 2 ]; do
        kill -0 $daemon || { cat daemon.log; exit 1; }
        sleep 0.2
    done
}

attach() {
    # Two connections: the server announces that it supports several clients.
    nbd-client -unix s /dev/nbd0 -N files.img -C 2 >attached 2>&1 &&
        nbd-client -unix s /dev/nbd1 -N raw.img -b 4096 >>attached 2>&1 && return
    cat attached
    exit 1
}

detach() { nbd-client -d /dev/nbd0 >/dev/null; nbd-client -d /dev/nbd1 >/dev/null; }
sum() { sha256sum <"$1" | cut -d' ' -f1; }

mkdir /mnt/files
serve
attach
for name in nbd0 nbd1; do
    echo "guest: $name has $(cat /sys/block/$name/size) sectors, $(cat /sys/block/$name/queue/write_cache), fua" \
        "$(cat /sys/block/$name/queue/fua)"
done

# A file system, and fio in it.
mkfs.ext4 -q -F /dev/nbd0 && mount -t ext4 /dev/nbd0 /mnt/files || exit 1
fio --name=verify --filename=/mnt/files/load --size=8M --rw=randwrite --bs=4k --direct=1 --ioengine=libaio --iodepth=8 \
    --fsync=8 --verify=crc32c --do_verify=1 --verify_fatal=1 --eta=never >fio.log 2>&1
echo "guest: fio: status $?"
grep -q 'err= *0' fio.log || cat fio.log

# Raw requests.
dd if=/dev/urandom of=pattern bs=1M count=64 2>/dev/null
dd if=pattern of=/dev/nbd1 bs=1M oflag=direct conv=fsync 2>/dev/null
blkdiscard -o 16777216 -l 8388608 /dev/nbd1
echo "guest: blkdiscard: status $?"
dd if=/dev/zero of=pattern bs=1M seek=16 count=8 conv=notrunc 2>/dev/null
echo 3 >/proc/sys/vm/drop_caches
[ "$(sum pattern)" = "$(sum /dev/nbd1)" ] && echo 'guest: raw disk reads back'

# Writes files, each with an fsync, and then kills the daemon.
for number in $(seq 20); do
    dd if=/dev/urandom of=content bs=4096 count=$((number % 7 + 1)) 2>/dev/null
    dd if=content of=/mnt/files/kept-$number bs=1M conv=fsync 2>/dev/null || exit 1
    sum content >kept-$number
done
kill -KILL $daemon
wait $daemon
echo "guest: killed: status $?"
umount -l /mnt/files
detach
serve
attach
mount -t ext4 /dev/nbd0 /mnt/files || exit 1
intact=0
for number in $(seq 20); do
    [ "$(sum /mnt/files/kept-$number)" = "$(cat kept-$number)" ] && intact=$((intact + 1))
done
echo "guest: intact $intact of 20"
rm /mnt/files/load
fstrim /mnt/files
echo "guest: fstrim: status $?"
umount /mnt/files
e2fsck -fn /dev/nbd0 >e2fsck.log 2>&1
echo "guest: e2fsck: status $?"
[ "$(sum pattern)" = "$(sum /dev/nbd1)" ] && echo 'guest: raw disk still reads back'

# The largest disk, which is sparse, on a file system that can hold such a file. Uses the last sector that Linux can
# address.
walvisor disk create /run/largest.img --size 9223372036854775296 --log /run/largest || exit
"$WALVISOR" serve nbd --disk path=/run/largest.img,log=/run/largest,socket=l >largest 2>largest.log &
until [ -s largest ]; do sleep 0.2; done
nbd-client -unix l /dev/nbd2 -N largest.img >attached 2>&1 || cat attached largest.log
echo "guest: nbd2 has $(cat /sys/block/nbd2/size) sectors"
last=$(($(cat /sys/block/nbd2/size) - 1))
head -c 512 pattern >sector
dd if=sector of=/dev/nbd2 bs=512 seek=$last oflag=direct conv=notrunc,fsync 2>/dev/null
echo "guest: last sector: write status $?"
dd if=/dev/nbd2 of=sector.back bs=512 skip=$last count=1 iflag=direct 2>/dev/null
cmp sector sector.back && echo 'guest: last sector reads back'
nbd-client -d /dev/nbd2 >/dev/null
kill -TERM $!
wait $!
echo "guest: daemon of the largest disk: status $?"
cat largest.log

# The end.
sum /dev/nbd0 >last
detach
kill -TERM $daemon
wait $daemon
echo "guest: daemon: status $?"
cat daemon.log
for name in files raw; do
    walvisor disk check $name.img --log log
    echo "guest: check of $name.img: status $?"
    walvisor disk export $name.img $name.raw --log log >/dev/null 2>&1 || exit 1
done
[ "$(sum files.raw)" = "$(cat last)" ] && echo 'guest: exported files.img is what the client saw'
[ "$(sum raw.raw)" = "$(sum pattern)" ] && echo 'guest: exported raw.img is what the client saw'
