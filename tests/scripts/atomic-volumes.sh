# Atomic writes on a raw disk, on a logical volume of LVM (dm-linear), and in files of ext4 and xfs on it.
# /bin/atomic is the program of atomic.c.
until [ -e /sys/block/sda ] && [ -e /sys/block/sdb ]; do sleep 0.1; done
version=$(uname -r)
echo "guest: Linux ${version%%[!0-9.]*}"
# The larger disk is LVM's. Which of them comes first is not said.
raw=sda large=sdb
[ "$(cat /sys/block/sda/size)" -lt "$(cat /sys/block/sdb/size)" ] || { raw=sdb large=sda; }
echo "guest: disk"
atomic /dev/$raw
no_udev='activation { udev_sync=0 udev_rules=0 }'
lvm() { /bin/lvm "$@" --config "$no_udev" >out 2>&1 || sed 's/^/guest: lvm: /' out; }
lvm pvcreate /dev/$large
lvm vgcreate group /dev/$large
lvm lvcreate --size 400M --name volume group
# Without udev the node of the volume has the name that device-mapper gives it.
volume=/dev/mapper/group-volume
echo "guest: volume"
atomic $volume
# file NAME: a file on the volume that has just been formatted.
file() {
    mount $volume /mnt || return
    dd if=/dev/zero of=/mnt/file bs=1M count=8 2>/dev/null
    sync
    echo "guest: $1"
    atomic /mnt/file
    umount /mnt
}
mkfs.ext4 -q -F -O bigalloc -C 65536 $volume
file ext4
mkfs.xfs -q -f -b size=65536 $volume
file xfs
mkfs.ext4 -q -F $volume
file 'ext4 by default'
