# Waits until both disks have grown, writes at their new ends, and prints the modes of their caches.
size() { cat "/sys/block/$1/size"; }
echo "guest: sizes $(size vda) $(size vdb)"
for name in vda vdb; do
    tries=0
    while [ "$(size $name)" = 65536 ] && [ $tries -lt 600 ]; do
        tries=$((tries + 1))
        sleep 0.1
    done
done
echo "guest: sizes $(size vda) $(size vdb)"
for name in vda vdb; do
    end=$(($(size $name) / 2048 - 1))
    head -c 1048576 /dev/zero | tr '\0' W | dd of=/dev/$name bs=1M seek=$end conv=fsync 2>/dev/null
    echo "guest: wrote the end of $name: status $?"
done
