#!/bin/sh
# First process of the machine around nested guests: /dev/vda holds the guests' images, /dev/vdb a directory for each job. Runs the
# jobs one after the other, leaves the exit status of each in its directory, and powers off: after the last one, or after one
# whose guest hung (status 75), because it may have done harm to this machine.
export PATH=/bin:/sbin HOME=/
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mkdir -p /dev/shm && mount -t tmpfs shm /dev/shm
echo "outer: ready"

# Each processor shows that it runs, until it is stuck.
pulse() {
    for processor in 0 1; do
        taskset $((1 << processor)) sh -c "while printf $processor; do sleep 3; done >/dev/ttyS1" &
    done
}

# What a job leaves must not speak in the next one, or take its space.
tidy() {
    kill -KILL -1
    wait
    cut -d' ' -f2 /proc/mounts | grep "^$1/" | sort -r | while read -r place; do umount "$place"; done
    grep -q " $1/" /proc/mounts || rm -rf "$1/files"
    rm -rf /tmp/* /dev/shm/*
    pulse
}

pulse
for module in /modules/*.ko; do
    insmod "$module" || echo "outer: cannot load $module"
done
if mount -t ext4 -o ro,noload /dev/vda /images && mount -t ext4 -o noinit_itable /dev/vdb /base; then
    if [ -c /dev/kvm ]; then
        set -- /base/[0-9]*
        for base; do
            # Behind what the job before has printed, which may be a part of a line.
            [ $# = 1 ] || { echo; echo "outer: job ${base##*/}"; }
            IMAGES=/images BASE=$base sh "$base/run.sh"
            status=$?
            [ $# = 1 ] || tidy "$base"
            echo $status >"$base/status"
            sync
            [ $status != 75 ] || break
        done
    else
        echo "outer: kvm_amd gives no /dev/kvm: QEMU's processor model has no SVM"
    fi
    sync
    umount /base
fi
poweroff -f
