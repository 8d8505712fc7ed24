# A guest with one disk on a log, and what is in its image afterwards. WRITES: how many writes fio does.
walvisor disk create disk.img --size 64M --log log || exit
{ echo "WRITES=$WRITES"; cat "$JOB/guest.sh"; } >guest.sh
guest_initrd guest.cpio guest.sh fio
run_guest guest 240 --kernel "$IMAGES/vmlinux" --initrd guest.cpio --cpus 1 --memory 512M \
    --cmdline 'console=ttyS0 quiet mitigations=off panic=-1 reboot=t' --metrics "$RESULTS/guest.prom" \
    --disk path=disk.img,log=log,transport=pci
echo "job: guest: status $?"
guest_files guest || exit
walvisor disk check disk.img --log log
echo "job: check: status $?"
walvisor disk checkpoint disk.img --log log >/dev/null || exit
e2fsck -fn disk.img >e2fsck.log 2>&1
echo "job: e2fsck: status $?"
sum=$(debugfs -R 'cat /file' disk.img 2>/dev/null | sha256sum | cut -d' ' -f1)
grep -q "^guest: sum $sum" "$RESULTS/guest.log" && echo 'job: the image has what the guest wrote'
exit 0
