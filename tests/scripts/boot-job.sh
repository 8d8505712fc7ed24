# Runs the embedded guest, which must also work if KVM runs ring 0 on the processor. Then boots the same two disks
# twice: with a bzImage that powers off, then with a PVH vmlinux from a root disk that reboots, with doorbells that
# exit and interrupts that are ioctls. Under the second guest both disks grow.
walvisor demo --json --dir . >"$RESULTS/embedded.json" 2>embedded.log
status=$?
cat embedded.log
[ $status = 0 ] || ! unrunnable embedded.log || exit 75
# A guest can hang under emulated SVM. The job is tried again then, and that is counted.
! grep -q 'the embedded guest said nothing for' embedded.log || exit 75
echo "job: embedded guest: status $status"

walvisor disk create mmio.img --size 32M || exit
walvisor disk create pci.img --size 32M || exit
walvisor disk create root.img --size 192M || exit
# The log is still empty, so the base image holds the whole disk.
dd if="$IMAGES/root.ext4" of=root.img bs=1M conv=notrunc 2>/dev/null
guest_initrd write.initrd "$JOB/write.sh"
guest_initrd read.initrd "$JOB/read.sh"

run_guest bzimage 120 --kernel "$IMAGES/vmlinuz" --initrd write.initrd --cpus 2 --memory 512M \
    --cmdline 'console=ttyS0 quiet mitigations=off panic=-1 reboot=t' --metrics "$RESULTS/bzimage.prom" \
    --disk path=mmio.img,transport=mmio,queues=2,serial=first --disk path=pci.img,transport=pci,queues=2,serial=second,queue-size=1024,block-size=4096,in-order=on,worker-cpus=0,poll-usec=50
echo "job: bzImage, power off: status $?"

start_guest vmlinux --kernel "$IMAGES/vmlinux" --initrd read.initrd --cpus 2 --memory 512M --control ctl \
    --cmdline 'console=ttyS0 quiet mitigations=off panic=-1 reboot=t root=/dev/vda guest.end=reboot' \
    --disk path=root.img,transport=mmio --disk path=mmio.img,transport=mmio,ioeventfd=off --disk path=pci.img,transport=pci,ioeventfd=off
wait_line vmlinux 'guest: sizes 65536 65536' 120 || { spoken vmlinux; exit 1; }
walvisor ctl ctl pause && walvisor ctl ctl resize --disk mmio.img --size 48M && walvisor ctl ctl resume
echo "job: growth of mmio.img: status $?"
walvisor ctl ctl resize --disk pci.img --size 64M
echo "job: growth of pci.img: status $?"
wait_guest vmlinux 120
echo "job: vmlinux, reboot: status $?"

for disk in mmio pci root; do
    walvisor disk check $disk.img
    echo "job: check of $disk.img: status $?"
done
for disk in mmio pci; do
    echo "job: end of $disk.img: $(tail -c 1048576 $disk.img | tr -d 'W' | wc -c) bytes are wrong"
done
