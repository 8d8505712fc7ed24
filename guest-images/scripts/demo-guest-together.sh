# The demonstration's second guest: fio on both disks at once, with WRITERS writers and as many files on each, on the
# file systems that the first guest made. SIZE and WRITERS are set before.
transports=
for disk in /sys/block/vd*; do
    case $(readlink -f "$disk") in
    */pci*) transport=pci ;;
    *) transport=mmio ;;
    esac
    transports="$transports $transport"
    mkdir /tmp/$transport && mount "/dev/${disk##*/}" /tmp/$transport || exit 1
done
fios=
for transport in $transports; do
    # overwrite: the files are laid out before, so that it is their data that is written, as in a database.
    fio --name=together --directory=/tmp/$transport --numjobs="$WRITERS" --group_reporting --overwrite=1 \
        --rw=randwrite --bs=4k --size="$SIZE" --direct=1 --ioengine=libaio --iodepth=1 --fsync=1 --randseed=1 \
        --eta=never --output-format=json --output=/tmp/$transport-together.json &
    fios="$fios $!"
done
for fio in $fios; do
    wait "$fio" || exit 1
done
for transport in $transports; do
    send_file /tmp/$transport-together.json
    umount /tmp/$transport || exit 1
done
