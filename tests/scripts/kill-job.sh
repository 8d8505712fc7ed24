# Kills walvisor twice in the middle of the guest's fio. Every boot after a kill checks all files that earlier boots
# reported as fsynced; the last boot then powers off.
for transport in mmio pci; do
    walvisor disk create $transport.img --size 128M || exit
done
: >kept

boot() {
    # Each boot's script carries the list of the files that it must find.
    { echo "LAST=$2"; echo "cat >/tmp/kept <<'LIST'"; cat kept; echo LIST; cat "$JOB/guest.sh"; } >guest.sh
    guest_initrd initrd guest.sh fio
    start_guest "$1" --kernel "$IMAGES/vmlinux" --initrd initrd --cpus 1 --memory 1G \
        --cmdline 'console=ttyS0 quiet panic=-1 reboot=t' \
        --disk path=mmio.img,transport=mmio,queues=2 --disk path=pci.img,transport=pci,queues=2
}

for round in 1 2; do
    progress "kill $round of 2: booting, then fio and fsyncs"
    boot round$round no
    # Each round has another number of files, so that each kill meets the log in another state.
    wait_line round$round "guest: kept .* $((round * 11)) " 240 || { spoken round$round; exit 1; }
    kill_guest round$round
    echo "job: round $round ended with status $(cat "$WORK/round$round.status")"
    # A line that the kill cut off lacks its end: its file does not count as reported.
    tr -d '\r' <"$RESULTS/round$round.log" | sed -n 's/^guest: kept \(.*\) end$/\1/p' >>kept
    for transport in mmio pci; do
        walvisor disk check $transport.img
        echo "job: check of $transport.img after kill $round: status $?"
    done
done
progress 'the last boot checks everything'
boot last yes
wait_guest last 240
echo "job: last boot ended with status $?"
echo "job: $(wc -l <kept) files were fsynced"
