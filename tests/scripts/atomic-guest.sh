# Atomic writes to each SCSI disk. /bin/atomic is the program of atomic.c.
until [ -e /sys/block/sda ] && [ -e /sys/block/sdb ]; do sleep 0.1; done
for disk in /sys/block/sd*; do
    case $(readlink -f "$disk") in */pci*) transport=pci ;; *) transport=mmio ;; esac
    echo "guest: disk on $transport, atomic_write_unit_max_bytes $(cat "$disk/queue/atomic_write_unit_max_bytes")"
    atomic "/dev/${disk##*/}"
done
