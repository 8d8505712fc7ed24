# Finds the disks by serial number, and writes different data to each.
echo "guest: processors $(nproc)"
for disk in /sys/block/vd*; do
    name=${disk##*/} serial=$(cat "$disk/serial")
    case $(readlink -f "$disk") in */pci*) transport=pci ;; *) transport=mmio ;; esac
    echo "guest: disk $serial is on $transport, $(ls "$disk/mq" | wc -l) queues, $(cat "$disk/size") sectors"
    for file in logical_block_size physical_block_size minimum_io_size max_segments max_segment_size discard_granularity \
        discard_max_bytes write_zeroes_max_bytes write_cache nr_requests; do
        echo "guest: $serial $file $(cat "$disk/queue/$file")"
    done
    echo "guest: $serial processors of its queues: $(cat "$disk"/mq/*/cpu_list | tr -d ' ' | tr '\n' ' ')"
    yes "the content of $serial" | head -c 2097152 | dd of=/dev/$name bs=1M oflag=direct conv=fsync 2>/dev/null || exit 1
    echo "guest: wrote $serial $(yes "the content of $serial" | head -c 2097152 | sha256sum | cut -d' ' -f1)"
done
