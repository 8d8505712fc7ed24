#!/bin/sh
# First process of a guest. In the initramfs it is /init: loads the modules, then either mounts the root file system
# named on the command line and continues as its /sbin/init (or what init= names), or stays. There it runs /job (appended
# to the initramfs) and ends the machine as guest.end=poweroff|reboot|halt says; without a job it gives a shell.
export PATH=/bin:/sbin HOME=/
root='' init=/sbin/init end=poweroff

if [ "$0" = /init ]; then
    mount -t proc proc /proc
    mount -t sysfs sys /sys
    mount -t devtmpfs dev /dev
    mount -t tmpfs run /run
    echo "guest: ready"
    for module in /modules/*.ko; do
        insmod "$module" || echo "guest: cannot load $module"
    done
    # The job outlives the change of the root in /run.
    [ -f /job ] && cp /job /run/job
fi

for word in $(cat /proc/cmdline); do
    case $word in
    root=*) root=${word#root=} ;;
    init=*) init=${word#init=} ;;
    guest.end=*) end=${word#guest.end=} ;;
    esac
done

if [ "$0" = /init ] && [ -n "$root" ]; then
    if ! mount -t ext4 "$root" /mnt; then
        echo "guest: cannot mount $root: it holds no ext4"
        poweroff -f
    fi
    # An absolute link points into the new root, which is not the root yet.
    if [ -e "/mnt$init" ] || [ -L "/mnt$init" ]; then
        for directory in proc sys dev run; do mount --move /$directory /mnt/$directory; done
        exec switch_root /mnt "$init"
    fi
    echo "guest: $root has no $init: a shell in its place, whose end powers off"
    for directory in proc sys dev run; do mount --bind /$directory /mnt/$directory; done
    setsid cttyhack chroot /mnt /bin/sh
    sync
    umount -a -r 2>/dev/null
    "$end" -f
fi
[ "$0" = /init ] || echo "guest: root is $root"

if [ -f /run/job ]; then
    (cd /tmp && exec sh /run/job </dev/null)
    echo "guest: job exit $?"
else
    echo "guest: no job; a shell"
    setsid cttyhack sh
fi
sync
umount -a -r 2>/dev/null
"$end" -f
