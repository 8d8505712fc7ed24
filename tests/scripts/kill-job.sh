# Kills walvisor twice in the middle of the guest's fio. The second guest checks all files that the first reported as
# fsynced. After the second kill the images must have the files of both.
for transport in mmio pci; do
    walvisor disk create $transport.img --size 128M || exit
done
: >kept

boot() {
    # Each boot's script carries the list of the files that it must find.
    { echo "cat >/tmp/kept <<'LIST'"; cat kept; echo LIST; cat "$JOB/guest.sh"; } >guest.sh
    guest_initrd initrd guest.sh fio
    start_guest "$1" --kernel "$IMAGES/vmlinux" --initrd initrd --cpus 1 --memory 1G \
        --cmdline 'console=ttyS0 quiet mitigations=off panic=-1 reboot=t' \
        --disk path=mmio.img,transport=mmio,queues=2 --disk path=pci.img,transport=pci,queues=2
}

for round in 1 2; do
    progress "kill $round of 2: booting, then fio and fsyncs"
    boot round$round
    # Each round has another number of files, so that each kill meets the log in another state.
    wait_line round$round "guest: kept .* $((round * 4)) " 240 || { spoken round$round; exit 1; }
    kill_guest round$round
    echo "job: round $round ended with status $(cat "$WORK/round$round.status")"
    # A line that the kill cut off lacks its end: its file does not count as reported.
    tr -d '\r' <"$RESULTS/round$round.log" | sed -n 's/^guest: kept \(.*\) end$/\1/p' >>kept
    for transport in mmio pci; do
        walvisor disk check $transport.img
        echo "job: check of $transport.img after kill $round: status $?"
    done
done
progress 'the images have every file'
intact=0 lost=0
for pair in vda:mmio vdb:pci; do
    image=${pair#*:}.img
    walvisor disk checkpoint $image >/dev/null
    echo "job: checkpoint of $image: status $?"
    # Status 1: e2fsck replayed the journal, and thus changed the file system.
    e2fsck -fp $image >e2fsck.log 2>&1
    status=$?
    [ $status -le 1 ] && echo "job: $image is a file system" || cat e2fsck.log
    while read -r name number sum; do
        [ $name = ${pair%:*} ] || continue
        if [ "$(debugfs -R "cat /kept-$number-$sum" $image 2>/dev/null | sha256sum | cut -d' ' -f1)" = "$sum" ]; then
            intact=$((intact + 1))
        else
            lost=$((lost + 1))
        fi
    done <kept
done
echo "job: intact $intact, lost $lost"
