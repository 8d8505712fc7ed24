# A guest with two networks, passt over MMIO and a tap device over PCI, fetches a file over passt and resets while it
# fetches more. Booted again, it fetches the file over both and sends it back. Then passt is killed: that link goes down, the other one and the disk go on.

# passt leaves its root file system, which cannot be an initramfs, and makes a user namespace, which takes a root of its own.
# It becomes nobody.
mkdir -p passt-root/proc
mount -t tmpfs passt-root passt-root
mkdir -p passt-root/bin passt-root/etc passt-root/proc passt-root/tmp
echo 'nobody:x:65534:65534:nobody:/:/bin/false' >passt-root/etc/passwd
cp "$JOB/passt" passt-root/bin/passt
chmod 755 passt-root/bin/passt
for library in libc.so.6 ld-linux-x86-64.so.2; do
    found=$(find / -xdev -name "$library" 2>/dev/null | head -n 1)
    mkdir -p "passt-root/lib/x86_64-linux-gnu" passt-root/lib64
    cp -L "$found" passt-root/lib/x86_64-linux-gnu/
done
cp passt-root/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2 passt-root/lib64/
mount -t proc proc passt-root/proc
cat >"$BASE/bin/passt" <<END
#!/bin/sh
exec unshare -m sh -c 'cd $WORK/passt-root && mount --move . / && exec chroot . /bin/passt "\$@"' passt "\$@"
END
chmod 755 "$BASE/bin/passt"

# What keeps the file systems in use at the end.
end() {
    killall httpd 2>/dev/null
    sleep 0.2
    umount passt-root/proc passt-root
}
trap end EXIT

# This machine's network: a device with an address and a default route, as passt wants one, and a server.
ip link set lo up
tunctl -t uplink >/dev/null
ip addr add 192.0.2.2/24 dev uplink
ip link set uplink up
ip route add default via 192.0.2.1 dev uplink
mkdir -p www/cgi-bin
head -c 1048576 /dev/urandom | base64 >www/file
# Answers what is sent with its sum.
cat >www/cgi-bin/sum <<'END'
#!/bin/sh
printf 'Content-Type: text/plain\r\n\r\n'
head -c "$CONTENT_LENGTH" | sha256sum
END
chmod 755 www/cgi-bin/sum
httpd -p 8080 -h "$WORK/www"
echo "job: sent $(sha256sum <www/file | cut -d' ' -f1)"

walvisor disk create disk.img --size 32M || exit
guest_initrd net.initrd "$JOB/net.sh"
start_guest net --kernel "$IMAGES/vmlinuz" --initrd net.initrd --memory 256M \
    --cmdline 'console=ttyS0 quiet mitigations=off panic=-1 reboot=t' --metrics "$RESULTS/net.prom" \
    --on-reboot restart --disk path=disk.img --net passt,host=on,mac=02:00:00:00:00:01 \
    --net tap=tap0,mac=02:00:00:00:00:02,transport=pci
ip addr add 10.9.0.1/24 dev tap0
ip link set tap0 up
wait_line net 'guest: both networks work' 180 || { spoken net; exit 1; }
kill "$(pidof passt)"
wait_guest net 180
status=$?
# More boots than the first and the one after the reset: the guest crashed, as emulated ones do at times, and was restarted.
if [ "$(grep -c 'guest: ready' "$RESULTS/net.log")" -gt 2 ]; then
    echo 'job: guest net crashed and was started again'
    exit 75
fi
echo "job: guest: status $status"
walvisor disk check disk.img
echo "job: check: status $?"
echo "job: on the disk: $(head -c 5 disk.img)"
