# The later boots: checks that the files kept by any earlier boot are there, keeps more files, and then makes the
# kernel panic.
STEP=$(device step)
echo "guest: processors $(nproc), root $(mount | grep ' / ' | cut -d' ' -f1-5)"
for type in ext4 xfs; do
    mkdir -p /mnt/$type
    mount -t $type "/dev/$(device $type)" /mnt/$type || exit 1
done
while read -r file sum; do
    if [ "$(file_sum "$file")" = "$sum" ]; then echo "guest: intact $file"; else echo "guest: lost $file"; fi
done </run/kept
for directory in / /mnt/ext4/ /mnt/xfs/; do keep ${directory}before-$CRASH 300; done
[ $CRASH = silent ] && rmmod pvpanic_mmio
echo "guest: job exit in a panic ($CRASH)"
# The kernel's output must not interrupt that line.
sleep 1
echo c >/proc/sysrq-trigger
