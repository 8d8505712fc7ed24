# Checks the file systems and the files listed in /tmp/kept (directory, number, SHA-256). Then lets fio run on both
# disks, meanwhile fsyncs file after file, and reports each file only after its fsync has returned.
for name in vda vdb; do
    mkdir /mnt/$name
    if [ -s /tmp/kept ]; then
        # The mount replays the journal.
        mount -t ext4 /dev/$name /mnt/$name && umount /mnt/$name || { echo "guest: $name does not mount"; exit 1; }
        e2fsck -fn /dev/$name >/tmp/e2fsck 2>&1
        echo "guest: e2fsck of $name: status $?"
        # e2fsck's status counts errors but not harmless leftovers; the text shows which.
        cat /tmp/e2fsck
    else
        mkfs.ext4 -q -F /dev/$name
    fi
    mount -t ext4 /dev/$name /mnt/$name || exit 1
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

flushes() { awk '{ print $16 }' /sys/block/$1/stat; }
for name in vda vdb; do
    flushes $name >/tmp/before-$name
    fio --name=load --filename=/mnt/$name/load --size=8M --rw=randwrite --bs=4k --direct=1 --ioengine=libaio \
        --iodepth=4 --fsync=1 --time_based --runtime=600 --eta=never >/tmp/fio-$name 2>&1 &
    echo $! >/tmp/pid-$name
done
# Until fio on each disk is at work: it sends a FLUSH for each of its writes.
for name in vda vdb; do
    until [ "$(flushes $name)" -ge $(($(cat /tmp/before-$name) + 10)) ]; do
        kill -0 "$(cat /tmp/pid-$name)" || { echo "guest: fio on $name ended"; cat /tmp/fio-$name; exit 1; }
        sleep 0.2
    done
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
