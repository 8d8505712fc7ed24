# A disk of `walvisor serve tcmu` for guests, over the kernel's vhost-scsi target. Runs on the Debian machine itself,
# whose kernel has that target, with no guest. That kernel has Landlock too.
(cd / && cpio -idu <"$IMAGES/initramfs-scsi.cpio" 2>/dev/null)
load() { for module; do insmod /modules/*-"$module".ko 2>/dev/null; done; }
load configfs scsi_common scsi_mod target_core_mod uio target_core_user
config=/sys/kernel/config
mount -t configfs configfs $config
walvisor serve tcmu --disk backend=ram,size=1M,fabric=vhost 2>missing
echo "job: status $?: $(sed 's/: as root run .*/: as root run .../' missing)"
load vhost_iotlb vhost vhost_scsi
mkdir disks
walvisor disk create disks/later.img --size 1M 2>/dev/null || exit
walvisor serve tcmu --disk backend=ram,size=1M,name=guest,fabric=vhost,wwn=naa.5001405000000042 --disk-dir disks \
    --control control >served 2>log &
daemon=$!
until [ -s served ]; do
    kill -0 $daemon 2>/dev/null || { cat log; exit 1; }
    sleep 0.2
done
echo "job: $(cat served)"
# Disks that come and go. This kernel has Landlock, which holds all the while.
add() { walvisor ctl control add-disk --json path=disks/later.img,fabric=$1,wwn=naa.5001405000000043; }
for time in 1 2; do
    echo "job: added at $(add vhost | sed 's/.*"place":"\([^"]*\)".*/\1/')"
    [ $time = 2 ] || echo "job: $(walvisor ctl control remove-disk --json later)"
done
walvisor ctl control remove-disk later >/dev/null
add loop 2>missing
echo "job: status $?: $(cat missing)"
kill -TERM $daemon
wait $daemon
echo "job: daemon: status $?"
cat log
echo "job: left: $(ls -d $config/target/core/user_* $config/target/vhost/naa.* 2>/dev/null | wc -l)"
exit 0
