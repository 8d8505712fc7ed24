# Disks of `walvisor serve tcmu` that come and go, and a backup, while fio writes to another disk of the same log. Begins with
# tcmu-functions.sh.
load configfs
mount -t configfs configfs $config
load target_core_user sd_mod tcm_loop
left() { say "left: $(ls -d $config/target/core/user_* $config/target/loopback/naa.* 2>/dev/null | wc -l)"; }

mkdir disks
walvisor disk create disks/stays.img --size 64M --log log || exit
# A raw image, which joins the log when it is first added.
truncate -s 16M disks/changes.img
walvisor disk create outside.img --size 1M
ctl() { walvisor ctl control "$@"; }
serve changing --disk path=disks/stays.img,log=log --disk-dir disks --control control
stays=$(disk_of changing stays)

mkdir -p /mnt/stays
mkfs.ext4 -q -F /dev/$stays && mount -t ext4 /dev/$stays /mnt/stays || exit 1
# Writes and verifies until the file `enough` appears.
rounds() {
    until [ -e enough ]; do
        fio --name=load --filename=/mnt/stays/load --size=2M --rw=randwrite --bs=4k --direct=1 --ioengine=libaio --iodepth=8 \
            --fsync=8 --verify=crc32c --do_verify=1 --verify_fatal=1 --eta=never >load.fio 2>&1 || { cat load.fio; return 1; }
    done
}
rounds &
load=$!
until [ -s /mnt/stays/load ]; do sleep 0.1; done

# What is on the disk that comes and goes.
truncate -s 16M whole
for cycle in 1 2 3 4 5 6; do
    # As one disk, and as one with larger blocks.
    blocks=$((cycle % 2 ? 512 : 4096))
    ctl add-disk --json path=disks/changes.img,log=log,block-size=$blocks >added || say 'not added'
    changes=$(sed -n 's|.*"place":"/dev/\([a-z]*\) .*|\1|p' added)
    [ "$(sum /dev/$changes)" = "$(sum whole)" ] && say "cycle $cycle: blocks of $(cat /sys/block/$changes/queue/logical_block_size), all is there"
    dd if=/dev/urandom of=part bs=64k count=4 2>/dev/null
    dd if=part of=/dev/$changes bs=64k seek=$((cycle * 5)) oflag=direct conv=notrunc,fsync 2>/dev/null
    dd if=part of=whole bs=64k seek=$((cycle * 5)) conv=notrunc 2>/dev/null
    # Written without a sync: removing the disk flushes it.
    dd if=part of=/dev/$changes bs=64k seek=$((cycle * 5 + 100)) conv=notrunc 2>/dev/null
    dd if=part of=whole bs=64k seek=$((cycle * 5 + 100)) conv=notrunc 2>/dev/null
    ctl remove-disk --json changes | sed 's/^/guest: /'
    cmp disks/changes.img whole || say 'the image is not complete'
    [ -e /sys/block/$changes ] && say "$changes is still there"
    walvisor serve tcmu --list | grep -c . | sed 's/^/guest: in the target: /'
done

# A backup beside the load.
ctl export --disk stays -o backup.img 2>/dev/null | sed 's/, [^,]* of them copied//; s/^/guest: /'
kill -0 $load && say 'the load goes on'
e2fsck -fy backup.img >e2fsck.log 2>&1
# 1: only the journal and what follows from it was repaired.
[ $? -le 1 ] && e2fsck -fn backup.img >e2fsck.log 2>&1 && say 'the backup is a file system'
fsfreeze --freeze /mnt/stays
ctl export --disk stays -o backup.img --force >/dev/null 2>&1
fsfreeze --unfreeze /mnt/stays
e2fsck -fn backup.img >e2fsck.log 2>&1
say "of the frozen file system: e2fsck status $?"

# What is refused.
fails walvisor ctl control add-disk path=disks/stays.img,log=log,name=other
fails walvisor ctl control add-disk path=disks/changes.img,log=log,name=stays
fails walvisor ctl control add-disk path=outside.img
fails walvisor ctl control add-disk path=disks/changes.img,log=log,fabric=vhost
fails walvisor ctl control remove-disk changes
# A disk that somebody else exports stays, and its initiators keep it.
ctl add-disk path=disks/changes.img,log=log,fabric=none >/dev/null || say 'not added'
other=$config/target/loopback/naa.5001405000000077
mkdir -p $other/tpgt_1 && echo naa.5001405000000078 >$other/tpgt_1/nexus && mkdir $other/tpgt_1/lun/lun_0
ln -s $config/target/core/user_*/changes $other/tpgt_1/lun/lun_0/changes
fails walvisor ctl control remove-disk changes
dd if=$config/target/core/user_0/stays/enable of=/dev/null 2>/dev/null || say 'the other disk has gone'
rm $other/tpgt_1/lun/lun_0/changes
rmdir $other/tpgt_1/lun/lun_0 && echo NULL >$other/tpgt_1/nexus && rmdir $other/tpgt_1 $other
ctl remove-disk --json changes | sed 's/^/guest: /'

# A pause does not hold a removal up, and all disks but one that is added later can go.
ctl add-disk path=disks/changes.img,log=log >/dev/null || say 'not added'
ctl pause >/dev/null
ctl remove-disk --json changes | sed 's/^/guest: /'
ctl resume >/dev/null

# A kill: the disk that was added is given to the next daemon as one of its command line.
ctl add-disk --json path=disks/changes.img,log=log,cache=writethrough >added || say 'not added'
changes=$(sed -n 's|.*"place":"/dev/\([a-z]*\) .*|\1|p' added)
dd if=part of=/dev/$changes bs=64k oflag=direct conv=notrunc 2>/dev/null
dd if=part of=whole bs=64k conv=notrunc 2>/dev/null
touch enough
wait $load
say "fio: status $?"
umount /mnt/stays
kill -KILL $daemon
wait $daemon
say "killed: status $?"
cat changing.log
serve again --disk path=disks/stays.img,log=log --disk path=disks/changes.img,log=log,cache=writethrough --control control
[ "$(sum /dev/$changes)" = "$(sum whole)" ] && say 'after the kill all is there'
ctl remove-disk --json stays | sed 's/^/guest: /'
stop again
left
