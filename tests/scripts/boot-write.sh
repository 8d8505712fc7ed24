# Finds the disks by serial number, and writes other data on each.
echo "guest: processors $(nproc)"
for disk in /sys/block/vd*; do
    name=${disk##*/} serial=$(cat "$disk/serial")
    case $(readlink -f "$disk") in */pci*) transport=pci ;; *) transport=mmio ;; esac
    echo "guest: disk $serial is on $transport, $(ls "$disk/mq" | wc -l) queues, $(cat "$disk/size") sectors"
    yes "the content of $serial" | head -c 8388608 | dd of=/dev/$name bs=1M oflag=direct conv=fsync 2>/dev/null || exit 1
    echo "guest: wrote $serial $(yes "the content of $serial" | head -c 8388608 | sha256sum | cut -d' ' -f1)"
done
