#!/bin/sh
# First process of the machine around a nested guest: /dev/vda holds the guest's images, /dev/vdb the job. Runs the job,
# leaves its exit status on /dev/vdb, and powers off.
export PATH=/bin:/sbin HOME=/
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mkdir -p /dev/shm && mount -t tmpfs shm /dev/shm
echo "outer: ready"
for module in /modules/*.ko; do
    insmod "$module" || echo "outer: cannot load $module"
done
if mount -t ext4 -o ro,noload /dev/vda /images && mount -t ext4 -o noinit_itable /dev/vdb /base; then
    if [ -c /dev/kvm ]; then
        IMAGES=/images BASE=/base sh /base/run.sh
        echo $? >/base/status
    else
        echo "outer: kvm_amd gives no /dev/kvm: QEMU's processor model has no SVM"
    fi
    sync
    umount /base
fi
poweroff -f
