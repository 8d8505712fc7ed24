# The disks of `walvisor serve tcmu` under the kernel's own SCSI target and disk driver: first the errors for missing
# parts, then two disks on one log, every command of sg3-utils, a file system, kills of the daemon under load, resize,
# the largest disk, and the state of configfs and the images at the end. Begins with tcmu-functions.sh.

# What is missing.
fails walvisor serve tcmu --list
load configfs
fails walvisor serve tcmu --list
mount -t configfs configfs $config
fails walvisor serve tcmu --list
load target_core_mod
fails walvisor serve tcmu --disk backend=ram,size=1M
load target_core_user sd_mod sg
fails walvisor serve tcmu --disk backend=ram,size=1M
load tcm_loop
say "left: $(ls -d $config/target/core/user_* $config/target/loopback/naa.* 2>/dev/null | wc -l)"

walvisor disk create files.img --size 192M --log log || exit
walvisor disk create raw.img --size 64M --log log || exit

both() {
    serve "$1" --disk path=files.img,log=log,name=files,cache=writethrough --disk path=raw.img,log=log,name=raw,block-size=4096 \
        --control control
    files=$(disk_of "$1" files) raw=$(disk_of "$1" raw)
}
# Attaching.
both first
for name in $files $raw; do
    queue=/sys/block/$name/queue
    say "$(($(cat /sys/block/$name/size) / 2048)) MiB in blocks of $(cat $queue/logical_block_size)," \
        "$(cat $queue/write_cache), fua $(cat $queue/fua), discards of $(cat $queue/discard_granularity) or more"
done
walvisor serve tcmu --list |
    sed "s/process $daemon/the daemon/; s/naa\.5001405[0-9a-f]*/naa/; s/of .*\//of /; s|/dev/$files|files|; s|/dev/$raw|raw|; s/^/guest: /"
fails walvisor serve tcmu --remove files

# Sg3-utils.
disk=/dev/$raw
# Runs a command of sg3-utils: prints its status, and checks that its output matches $1, unless $1 is empty.
sg() {
    pattern=$1
    shift
    "$@" >out 2>&1
    say "$1: status $?"
    [ -z "$pattern" ] || grep -q -i -e "$pattern" out || cat out
}
sg 'WALVISOR' sg_inq $disk
sg 'Block limits' sg_vpd -p 0x00 $disk
sg 'serial' sg_vpd -p 0x80 $disk
sg 'naa' sg_vpd -p 0x83 $disk
sg 'Optimal unmap granularity' sg_vpd -p 0xb0 $disk
sg 'rotat' sg_vpd -p 0xb1 $disk
sg 'LBPU' sg_vpd -p 0xb2 $disk
sg 'Last LBA=16383 ' sg_readcap $disk
sg 'Last LBA=16383 ' sg_readcap --16 $disk
sg 'Write same(16)' sg_opcodes $disk
sg 'Caching' sg_modes -a $disk
sg 'LUN' sg_luns $disk
sg '' sg_turs $disk
sg '' sg_requests $disk
sg '' sg_sync $disk
head -c 65536 /dev/urandom >pattern
head -c 4096 pattern >block
head -c 4096 /dev/zero >zeroes
sg 'records out' sg_dd if=pattern of=$disk bs=4096 seek=16 count=16 blk_sgio=1
sg '' sg_verify --lba=16 --count=16 $disk
sg '' sg_unmap --lba=20 --num=4 --force $disk
dd if=/dev/zero of=pattern bs=4096 seek=4 count=4 conv=notrunc 2>/dev/null
sg '' sg_write_same --lba=24 --num=4 --in=block $disk
for at in 8 9 10 11; do dd if=block of=pattern bs=4096 seek=$at conv=notrunc 2>/dev/null; done
sg '' sg_write_same --unmap --lba=28 --num=1 --in=zeroes $disk
dd if=zeroes of=pattern bs=4096 seek=12 conv=notrunc 2>/dev/null
cat block zeroes >compare
sg '' sg_compare_and_write --lba=24 --num=1 --xferlen=8192 --in=compare $disk
dd if=zeroes of=pattern bs=4096 seek=8 conv=notrunc 2>/dev/null
sg 'miscompare' sg_compare_and_write --lba=24 --num=1 --xferlen=8192 --in=compare $disk
dd if=$disk of=back bs=4096 skip=16 count=16 iflag=direct 2>/dev/null
cmp pattern back && say 'blocks are what the commands made of them'
# One atomic write of all that tcm_loop takes at once, which the disk driver passes whole too.
atomic_limits() { sg_vpd -p bl $disk | grep -i atomic | sed 's/^ */guest: /'; }
atomic_limits
say "requests of $(cat /sys/block/$raw/queue/max_sectors_kb) KiB"
head -c 1048576 /dev/urandom >pages
sg '' sg_write_x --atomic=0 --lba=33 --num=256 --in=pages $disk
dd if=$disk of=back bs=4096 skip=33 count=256 iflag=direct 2>/dev/null
cmp pages back && say 'an atomic write is there'
# Refused commands: the sense data must state the error, and its place in the CDB.
refused() {
    sg_raw -s 0 $disk "$@" >out 2>&1
    say "$1: $(sed -n 's/.*\(Additional sense: .*\)/\1/p; s/.*\(Error in Command.*\)/\1/p; s/.*\(Field pointer.*\)/\1/p' out | xargs)"
}
refused 28 00 00 00 40 00 00 00 01 00
refused 2a e0 00 00 00 00 00 00 01 00
refused 91 00 ff ff ff ff ff ff ff ff 00 00 00 00 00 00
refused 12 00 80 00 ff 00
refused 5f 00 00 00 00 00 00 00 18 00
refused c1 00 00 00 00 00 00 00 00 00
# A block more than what is promised, and a boundary.
refused 9c 00 00 00 00 00 00 00 00 00 00 00 10 01 00 00
refused 9c 00 00 00 00 00 00 00 00 00 00 08 00 10 00 00

# Ext4 and fio.
mkdir -p /mnt/files
mkfs.ext4 -q -F /dev/$files && mount -t ext4 /dev/$files /mnt/files || exit 1
verify() {
    fio --name="$1" --filename=/mnt/files/"$1" --size="$2" --rw=randwrite --bs=4k --direct=1 --ioengine=libaio --iodepth=8 \
        --fsync=8 --verify=crc32c --do_verify=1 --verify_fatal=1 --eta=never >"$1".fio 2>&1
    echo $? >"$1".status
}
verify quiet 4M
say "fio: status $(cat quiet.status)"
grep -q 'err= *0' quiet.fio || cat quiet.fio
dd if=/dev/urandom of=whole bs=1M count=64 2>/dev/null
dd if=whole of=/dev/$raw bs=1M oflag=direct conv=fsync 2>/dev/null
blkdiscard -o 16777216 -l 8388608 /dev/$raw
say "blkdiscard: status $?"
dd if=/dev/zero of=whole bs=1M seek=16 count=8 conv=notrunc 2>/dev/null
echo 3 >/proc/sys/vm/drop_caches
[ "$(sum whole)" = "$(sum /dev/$raw)" ] && say 'raw disk reads back'

# A kill under load.
for round in 1 2; do
    verify load-$round 4M &
    load=$!
    until [ -s /mnt/files/load-$round ]; do sleep 0.1; done
    sleep 1
    kill -KILL $daemon
    wait $daemon
    say "killed: status $?"
    both round-$round
    wait $load
    say "fio saw: status $(cat load-$round.status)"
    grep -q 'err= *0' load-$round.fio || cat load-$round.fio
done
grep -o "disk 'raw': the last process died with unflushed writes" round-2.log | sed 's/^/guest: /'
for number in $(seq 10); do
    dd if=/dev/urandom of=content bs=4096 count=$((number % 7 + 1)) 2>/dev/null
    dd if=content of=/mnt/files/kept-$number bs=1M conv=fsync 2>/dev/null || exit 1
    sum content >kept-$number
done
fstrim /mnt/files
say "fstrim: status $?"
umount /mnt/files
kill -KILL $daemon
wait $daemon
walvisor serve tcmu --list | grep -c 'not served' | sed 's/^/guest: not served: /'
walvisor serve tcmu --remove --all | sed 's/^/guest: /'
say "left: $(ls -d $config/target/core/user_* $config/target/loopback/naa.* 2>/dev/null | wc -l)"
both second
mount -t ext4 /dev/$files /mnt/files || exit 1
intact=0
for number in $(seq 10); do
    [ "$(sum /mnt/files/kept-$number)" = "$(cat kept-$number)" ] && intact=$((intact + 1))
done
say "intact $intact of 10"
umount /mnt/files
e2fsck -fn /dev/$files >e2fsck.log 2>&1
say "e2fsck: status $?"
[ "$(sum whole)" = "$(sum /dev/$raw)" ] && say 'raw disk still reads back'
sum /dev/$files >last

# Resize, and the cache mode.
walvisor ctl control resize --disk raw --size 96M >/dev/null || say 'no resize'
echo 1 >/sys/block/$raw/device/rescan
say "after ctl: $(blockdev --getsize64 /dev/$raw) bytes, $(cat $config/target/core/user_*/raw/attrib/dev_size) in configfs"
echo 134217728 >$(echo $config/target/core/user_*/raw/attrib/dev_size)
until walvisor ctl control stats --json | grep -q 134217728; do sleep 0.2; done
echo 1 >/sys/block/$raw/device/rescan
say "after configfs: $(blockdev --getsize64 /dev/$raw) bytes"
echo 0 >$(echo $config/target/core/user_*/raw/attrib/emulate_write_cache)
until [ "$(cat /sys/block/$raw/queue/write_cache)" = 'write through' ]; do
    sleep 0.2
    echo 1 >/sys/block/$raw/device/rescan
done
say "cache: $(cat /sys/block/$raw/queue/write_cache)"
stop second
say "left: $(ls -d $config/target/core/user_* $config/target/loopback/naa.* 2>/dev/null | wc -l)"

# Atomic writes are promised neither without a log nor of what is written to a look.
truncate -s 1M plain.img
for spec in path=plain.img,backend=raw path=raw.img,log=log,at=newest,scratch=on; do
    serve plain --disk $spec,name=plain
    disk=/dev/$(disk_of plain plain)
    atomic_limits | head -n 1
    refused 9c 00 00 00 00 00 00 00 00 00 00 00 00 01 00 00
    stop plain
done

# Wakes.
for depth in 1 32; do
    serve depth-$depth --disk backend=ram,size=16M
    fio --name=wakes --filename=/dev/"$(disk_of depth-$depth ram)" --rw=randread --bs=4k --direct=1 --ioengine=libaio \
        --iodepth=$depth --iodepth_batch_submit=$depth --iodepth_batch_complete_min=$depth --number_ios=1600 --eta=never >fio.log 2>&1 || cat fio.log
    stop depth-$depth
done

# Flushes of several disks.
together='' jobs=''
for name in a b c d; do
    walvisor disk create $name.img --size 8M --log shared || exit
    together="$together --disk path=$name.img,log=shared"
done
serve together $together
for name in a b c d; do
    jobs="$jobs --name=$name --filename=/dev/$(disk_of together $name)"
done
fio --name=global --rw=randwrite --bs=4k --direct=1 --fsync=1 --number_ios=60 --eta=never $jobs >fio.log 2>&1 || cat fio.log
stop together

# The largest disk.
# The largest disk, which is sparse, on a file system that holds files of any length. Uses the last sector that Linux
# can address.
walvisor disk create /run/largest.img --size 9223372036854775296 --log /run/largest || exit
serve largest --disk path=/run/largest.img,log=/run/largest,command-timeout=60
largest=$(disk_of largest largest)
say "the largest has $(cat /sys/block/$largest/size) sectors, its commands $(cat $config/target/core/user_*/largest/attrib/cmd_time_out) s"
last=$(($(cat /sys/block/$largest/size) - 1))
head -c 512 block >sector
dd if=sector of=/dev/$largest bs=512 seek=$last oflag=direct conv=notrunc,fsync 2>/dev/null
say "last sector: write status $?"
dd if=/dev/$largest of=sector.back bs=512 skip=$last count=1 iflag=direct 2>/dev/null
cmp sector sector.back && say 'last sector reads back'
stop largest

# The images.
for name in files raw; do
    walvisor disk check $name.img --log log
    say "check of $name.img: status $?"
    walvisor disk export $name.img $name.raw --log log >/dev/null 2>&1 || exit 1
done
[ "$(sum files.raw)" = "$(cat last)" ] && say 'exported files.img is what the kernel saw'
head -c 67108864 raw.raw >raw.begin
[ "$(sum raw.begin)" = "$(sum whole)" ] && say 'exported raw.img is what the kernel saw'
