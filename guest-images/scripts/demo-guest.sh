# The demonstration's first guest: ext4 and fio on every disk, one after the other. SIZE is set before.
run=0 runs=8
for disk in /sys/block/vd*; do
    name=${disk##*/}
    case $(readlink -f "$disk") in
    */pci*) transport=pci ;;
    *) transport=mmio ;;
    esac
    echo "guest: disk $name over virtio-$transport, $(cat "$disk/mq/"*/cpu_list | wc -l) queues"
    mkfs.ext4 -q -F "/dev/$name" && mount "/dev/$name" /mnt || exit 1
    for depth in 1 32; do
        for job in fsync verify; do
            run=$((run + 1))
            echo "progress: fio run $run of $runs: virtio-$transport, $job, iodepth $depth"
            case $job in
            fsync) options=--fsync=1 ;;
            verify) options='--verify=crc32c --verify_fatal=1' ;;
            esac
            fio --name=$job --filename=/mnt/file --rw=randwrite --bs=4k --size="$SIZE" --direct=1 \
                --ioengine=libaio --iodepth=$depth $options --randseed=1 \
                --eta=never --output-format=json --output=/tmp/$transport-$job-$depth.json || exit 1
            send_file /tmp/$transport-$job-$depth.json
            rm /mnt/file
        done
    done
    umount /mnt || exit 1
done
