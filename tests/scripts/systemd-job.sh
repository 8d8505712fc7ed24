# What an administrator does with the package and its units. Each line that begins with `guest: ` is compared by the test.
files() { find /usr /etc /var/lib /run/walvisor -name '*walvisor*' 2>/dev/null | sort; }
files >/root/before
package() {
    dpkg "$@" >/root/dpkg 2>&1 && return
    cat /root/dpkg
    echo "guest: dpkg $1 failed"
}
package -i /root/walvisor.deb
echo "guest: installed: $(systemctl is-enabled walvisor-nbd.socket)"
mkdir /var/lib/walvisor
walvisor disk create /var/lib/walvisor/disk.img --size 1G
walvisor disk create /var/lib/walvisor/vm.img --size 64M
state() { echo "guest: $1: $(systemctl is-active walvisor-nbd.socket walvisor-nbd.service | tr '\n' ' ')"; }
systemctl -q enable walvisor-nbd.socket walvisor-nbd.service walvisor-vhost-user.socket walvisor-vhost-user.service
echo "guest: enabled: $(systemctl is-enabled walvisor-nbd.socket walvisor-nbd.service | tr '\n' ' ')"
systemctl start walvisor-nbd.socket
state 'socket started'

# A client that writes and flushes, and connects again whenever the daemon has gone.
cat >/root/client <<'END'
import nbd, sys
# 4 KiB blocks until it has connected again so many times, each with its number in it.
wanted, restarts, told, n = int(sys.argv[1]), 0, None, 0
def connect():
    # A daemon that is ending may still accept.
    while True:
        try:
            h = nbd.NBD()
            h.connect_uri('nbd+unix:///disk.img?socket=/run/walvisor/disk.sock')
            return h
        except nbd.Error:
            pass
def block(n):
    return n.to_bytes(4, 'little') * 1024
h = connect()
while restarts < wanted or n < 10:
    try:
        h.pwrite(block(n), n * 4096)
        h.flush()
        n += 1
        if told != restarts:
            open('/root/restarts', 'w').write(str(restarts))
            told = restarts
    except nbd.Error:
        restarts += 1
        h = connect()
wrong = sum(h.pread(4096, at * 4096) != block(at) for at in range(n))
print('guest: client: all its blocks are there' if wrong == 0 else f'guest: client: {wrong} blocks are wrong', flush=True)
END
python3 /root/client 0
state 'a client came'
# By what systemd notes of its dynamic users: this machine may have neither ps nor the library that knows their names.
uid=$(stat -c %u "/proc/$(systemctl show -P MainPID walvisor-nbd.service)")
echo "guest: it runs as $(readlink "/run/systemd/dynamic-uid/direct:$uid")"
# A disk that root makes later belongs to root.
walvisor disk create /var/lib/walvisor/later.img --size 1M
chown -R --reference /var/lib/walvisor/ /var/lib/walvisor/later.img*

rm /root/restarts
python3 /root/client 4 &
client=$!
comes_back() { until [ "$(cat /root/restarts 2>/dev/null || echo -1)" -ge $1 ]; do sleep 0.1; done; }
for time in 1 2 3; do
    comes_back $((time - 1))
    systemctl restart walvisor-nbd.service
    echo "guest: restart $time: $?"
done
comes_back 3
systemctl kill -s KILL walvisor-nbd.service
wait $client
state 'after a kill'

began=$(date +%s)
systemctl stop walvisor-nbd.socket walvisor-nbd.service
echo "guest: stopped: $? $(systemctl show -P Result walvisor-nbd.service) $(systemctl show -P ExecMainStatus walvisor-nbd.service)"
[ $(($(date +%s) - began)) -lt 300 ] && echo 'guest: within TimeoutStopSec'
walvisor disk check /var/lib/walvisor/disk.img >/dev/null && echo 'guest: the disk is clean'

systemctl start walvisor-vhost-user.service
echo "guest: vhost-user: $(systemctl is-active walvisor-vhost-user.service)"
[ -S /run/walvisor/vm.sock ] && systemctl stop walvisor-vhost-user.socket walvisor-vhost-user.service
echo "guest: vhost-user stopped: $(systemctl show -P Result walvisor-vhost-user.service)"

# A pool: disks come while it runs, the file remembers them, and after a kill they are there again.
mkdir -p /etc/walvisor
cat >/etc/walvisor/pool.toml <<'END'
[defaults]
door = "vhost-user"
log = "/var/lib/walvisor/pool.wal"
metrics-listen = "localhost:9790"

[[disk]]
path = "/var/lib/walvisor/a.img"
socket = "/run/walvisor/pool/a.sock"
END
for disk in a b; do walvisor disk create /var/lib/walvisor/$disk.img --size 64M --log /var/lib/walvisor/pool.wal; done
chown -R --reference /var/lib/walvisor/ /var/lib/walvisor/[ab].img /var/lib/walvisor/pool.wal
ctl() { walvisor ctl /run/walvisor/pool/ctl "$@"; }
cat >/root/scrape <<'END'
import http.client, socket, sys
connection = http.client.HTTPConnection(sys.argv[1])
if '/' in sys.argv[1]:
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(sys.argv[1])
connection.request('GET', '/metrics')
text = connection.getresponse().read().decode()
print('guest: metrics:', *sorted(line.split('"')[1].rsplit('/')[-1] for line in text.splitlines() if 'disk_info{' in line))
END
# As the page says, with a group that is here.
mkdir -p /etc/systemd/system/walvisor@.service.d
printf '[Service]\nGroup=users\n' >/etc/systemd/system/walvisor@.service.d/group.conf
systemctl daemon-reload
systemctl -q enable walvisor@pool
systemctl start walvisor@pool
until ctl stats >/dev/null 2>&1; do sleep 0.1; done
echo "guest: pool: $(systemctl is-active walvisor@pool) $(stat -c '%a' /run/walvisor/pool/) $(stat -c '%a %G' /run/walvisor/pool/a.sock)"
python3 /root/scrape localhost:9790
ctl add-disk path=/var/lib/walvisor/b.img,log=/var/lib/walvisor/pool.wal,socket=/run/walvisor/pool/b.sock,door=vhost-user || echo 'guest: no disk added'
python3 /root/scrape /run/walvisor/pool/metrics
ctl save-config /etc/walvisor/pool.toml
systemctl kill -s KILL walvisor@pool
until ctl stats >/dev/null 2>&1; do sleep 0.1; done
python3 /root/scrape localhost:9790
sed -i '/a.img/,/a.sock/d; 0,/\[\[disk\]\]/{/\[\[disk\]\]/d}' /etc/walvisor/pool.toml
systemctl reload walvisor@pool
until [ "$(ctl stats --json | grep -c a.sock)" = 0 ] && ! ctl stats --json | grep -q a.img; do sleep 0.1; done
python3 /root/scrape localhost:9790

journalctl --no-pager -o cat -u walvisor-nbd.service >/root/journal
sed 's/^/journal: /' /root/journal
echo "guest: journal: $(grep -c '^Started' /root/journal) starts"
grep -q '^serving /var/lib/walvisor/disk.img: 1 GiB at nbd+unix:' /root/journal && echo 'guest: journal: what walvisor prints'

# The package is removed while a daemon runs. A sixth start within ten seconds would be one too many.
systemctl reset-failed
systemctl start walvisor-nbd.socket
python3 /root/client 0
package --remove walvisor
echo "guest: removed: $(systemctl is-active walvisor-nbd.service walvisor@pool.service | tr '\n' ' ')"
ls /var/lib/walvisor | sed 's/^/guest: kept: /'
rm -r /var/lib/walvisor/* /etc/walvisor /etc/systemd/system/walvisor@.service.d
package --purge walvisor
files >/root/after
diff /root/before /root/after && [ ! -e /run/walvisor ] && echo 'guest: purged: nothing is left'
echo 'guest: end'
