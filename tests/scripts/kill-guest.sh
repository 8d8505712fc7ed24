# Checks the files listed in /tmp/kept (directory, number, SHA-256). Unless this is the LAST boot, then lets fio run
# on both disks, meanwhile fsyncs file after file, and reports each file only after its fsync has returned.
for name in vda vdb; do
    mkdir /mnt/$name
    if ! mount -t ext4 /dev/$name /mnt/$name; then
        [ -s /tmp/kept ] && { echo "guest: $name does not mount"; exit 1; }
        mkfs.ext4 -q -F /dev/$name && mount -t ext4 /dev/$name /mnt/$name || exit 1
    fi
done

intact=0 lost=0
while read -r name number sum; do
    if [ "$(sha256sum <"/mnt/$name/kept-$number-$sum" | cut -d' ' -f1)" = "$sum" ]; then
        intact=$((intact + 1))
    else
        lost=$((lost + 1))
        echo "guest: lost $name $number $sum"
    fi
done </tmp/kept
echo "guest: intact $intact, lost $lost"

if [ $LAST = yes ]; then
    for name in vda vdb; do
        umount /mnt/$name
        e2fsck -fn /dev/$name >/tmp/e2fsck 2>&1
        echo "guest: e2fsck of $name: status $?"
        # e2fsck's status counts errors but not harmless leftovers; the text shows which.
        cat /tmp/e2fsck
    done
    exit 0
fi

for name in vda vdb; do
    fio --name=load --filename=/mnt/$name/load --size=8M --rw=randwrite --bs=4k --direct=1 --ioengine=libaio \
        --iodepth=4 --fsync=1 --time_based --runtime=600 --eta=never >/tmp/fio-$name 2>&1 &
    echo $! >/tmp/pid-$name
done
number=0
while :; do
    number=$((number + 1))
    for name in vda vdb; do
        dd if=/dev/urandom of=/tmp/content bs=4096 count=$((number % 7 + 1)) 2>/dev/null
        sum=$(sha256sum </tmp/content | cut -d' ' -f1)
        file=/mnt/$name/kept-$number-$sum
        # fsync of a new file makes its name durable too: ext4 commits the transaction that holds both.
        dd if=/tmp/content of="$file" bs=1M conv=fsync 2>/dev/null || exit 1
        kill -0 "$(cat /tmp/pid-$name)" || { echo "guest: fio on $name ended"; cat /tmp/fio-$name; exit 1; }
        echo "guest: kept $name $number $sum end"
    done
done
