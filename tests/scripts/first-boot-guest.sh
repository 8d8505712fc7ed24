# ext4 and fio on the disk. WRITES is set before.
mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt || exit
fio --name=first --filename=/mnt/file --rw=randwrite --bs=4k --size=$((WRITES * 4))k --direct=1 --ioengine=libaio --iodepth=1 \
    --fsync=1 --verify=crc32c --verify_fatal=1 --randseed=1 --eta=never --output-format=json --output=/tmp/fio.json || exit
send_file /tmp/fio.json
echo "guest: sum $(sha256sum </mnt/file | cut -d' ' -f1)"
umount /mnt
