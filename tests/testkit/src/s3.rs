//! A small S3 server on a port of this machine: objects in memory, conditions kept, and requests
//! that go wrong in the ways that networks have.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::Random;

/// Environment variables that a client of the server needs. It checks no key.
pub const KEYS: [(&str, &str); 3] = [
    ("AWS_ACCESS_KEY_ID", "key"),
    ("AWS_SECRET_ACCESS_KEY", "secret"),
    ("AWS_REGION", "here"),
];

/// The server. Dropping it ends it, but not its connections.
pub struct S3 {
    address: String,
    state: Arc<State>,
}

struct State {
    bucket: String,
    objects: Mutex<BTreeMap<String, Vec<u8>>>,
    random: Mutex<Random>,
    one_in: AtomicU64,
    faults: AtomicU64,
    delay_us: AtomicU64,
    /// What the names have of the objects that come late.
    delayed: Mutex<&'static str>,
    ended: AtomicBool,
}

struct Request {
    method: String,
    key: String,
    query: String,
    create: bool,
    range: Option<(usize, usize)>,
    body: Vec<u8>,
}

impl S3 {
    /// Starts a server with an empty bucket.
    #[must_use]
    pub fn start(bucket: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let state = Arc::new(State {
            bucket: bucket.to_owned(),
            objects: Mutex::default(),
            random: Mutex::new(Random(7)),
            one_in: 0.into(),
            faults: 0.into(),
            delay_us: 0.into(),
            delayed: Mutex::default(),
            ended: false.into(),
        });
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if shared.ended.load(Ordering::SeqCst) {
                    break;
                }
                let state = shared.clone();
                std::thread::spawn(move || serve(&state, &stream));
            }
        });
        Self { address, state }
    }

    /// The address of an archive in the bucket.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("s3://{path}?endpoint=http://{}", self.address)
    }

    /// From now on, one in so many requests goes wrong; 0: none.
    pub fn fail_one_in(&self, one_in: u64) {
        self.state.one_in.store(one_in, Ordering::SeqCst);
    }

    /// Requests that went wrong.
    #[must_use]
    pub fn faults(&self) -> u64 {
        self.state.faults.load(Ordering::SeqCst)
    }

    /// From now on, each answer comes so much later, as if the server were far away.
    pub fn delay(&self, delay: Duration) {
        self.delay_of("", delay);
    }

    /// As [`delay`](Self::delay), but only for objects with `part` in their names.
    pub fn delay_of(&self, part: &'static str, delay: Duration) {
        *self.state.delayed.lock().unwrap() = part;
        let delay = delay.as_micros() as u64;
        self.state.delay_us.store(delay, Ordering::SeqCst);
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::SeqCst);
        // Wakes the listener, which then ends.
        let _ = TcpStream::connect(&self.address);
    }
}

/// Answers the requests of a connection until one goes wrong.
fn serve(state: &State, stream: &TcpStream) {
    let mut reader = BufReader::new(stream);
    while let Ok(Some(request)) = read(&mut reader) {
        let delay = state.delay_us.load(Ordering::SeqCst);
        if request.key.contains(*state.delayed.lock().unwrap()) {
            std::thread::sleep(Duration::from_micros(delay));
        }
        let one_in = state.one_in.load(Ordering::SeqCst);
        let fault = (one_in > 0).then(|| {
            let mut random = state.random.lock().unwrap();
            random.one_in(one_in).then(|| random.below(4))
        });
        let fault = fault.flatten();
        state
            .faults
            .fetch_add(u64::from(fault.is_some()), Ordering::SeqCst);
        let done = match fault {
            // Busy, before or after it was carried out.
            Some(0) => answer(stream, "503 Slow Down", &[], b"", true),
            Some(1) => {
                state.answer(&request, &mut io::sink()).unwrap();
                answer(stream, "500 Internal Server Error", &[], b"", true)
            }
            // The answer is lost, or only half of it comes.
            Some(2) => state.answer(&request, &mut io::sink()).and(Err(lost())),
            Some(_) => {
                let mut whole = Vec::new();
                state.answer(&request, &mut whole).unwrap();
                let mut stream = stream;
                stream.write_all(&whole[..whole.len() / 2]).and(Err(lost()))
            }
            None => state.answer(&request, &mut &*stream),
        };
        if done.is_err() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
            return;
        }
    }
}

fn lost() -> io::Error {
    io::ErrorKind::ConnectionReset.into()
}

fn read(reader: &mut impl BufRead) -> io::Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split(' ');
    let method = words.next().unwrap_or_default().to_owned();
    let target = words.next().unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut request = Request {
        method,
        key: path.trim_start_matches('/').to_owned(),
        query: query.replace("%2F", "/"),
        create: false,
        range: None,
        body: Vec::new(),
    };
    let mut len = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim().split_once(": ") else {
            break;
        };
        match name.to_lowercase().as_str() {
            "content-length" => len = value.parse().unwrap(),
            "if-none-match" => request.create = value == "*",
            "range" => {
                let (first, last) = value.trim_start_matches("bytes=").split_once('-').unwrap();
                request.range = Some((first.parse().unwrap(), last.parse().unwrap()));
            }
            _ => {}
        }
    }
    request.body = vec![0; len];
    reader.read_exact(&mut request.body)?;
    Ok(Some(request))
}

fn answer(
    mut to: impl Write,
    status: &str,
    headers: &[&str],
    body: &[u8],
    with_body: bool,
) -> io::Result<()> {
    let mut head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n", body.len());
    for header in headers {
        head.push_str(&format!("{header}\r\n"));
    }
    head.push_str("\r\n");
    let mut whole = head.into_bytes();
    if with_body {
        whole.extend_from_slice(body);
    }
    to.write_all(&whole)
}

impl State {
    fn answer(&self, request: &Request, to: &mut dyn Write) -> io::Result<()> {
        const OBJECT: [&str; 2] = [
            "ETag: \"an-object\"",
            "Last-Modified: Fri, 27 Nov 2026 12:00:00 GMT",
        ];
        let mut objects = self.objects.lock().unwrap();
        let key = request.key.strip_prefix(&self.bucket);
        let key = key.map(|key| key.trim_start_matches('/').to_owned());
        let no = |to: &mut dyn Write, status: &str, code: &str| {
            let body = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code></Error>");
            answer(to, status, &[], body.as_bytes(), request.method != "HEAD")
        };
        let Some(key) = key else {
            return no(to, "404 Not Found", "NoSuchBucket");
        };
        match request.method.as_str() {
            "PUT" if request.create && objects.contains_key(&key) => {
                no(to, "412 Precondition Failed", "PreconditionFailed")
            }
            "PUT" => {
                objects.insert(key, request.body.clone());
                answer(to, "200 OK", &OBJECT, b"", true)
            }
            "DELETE" => {
                objects.remove(&key);
                answer(to, "204 No Content", &[], b"", true)
            }
            "GET" if key.is_empty() => {
                let prefix = request
                    .query
                    .split('&')
                    .find_map(|pair| pair.strip_prefix("prefix="));
                let prefix = prefix.unwrap_or_default();
                let mut body = "<?xml version=\"1.0\"?><ListBucketResult>".to_owned();
                for (key, bytes) in objects.iter().filter(|(key, _)| key.starts_with(prefix)) {
                    body.push_str(&format!(
                        "<Contents><Key>{key}</Key><Size>{}</Size><ETag>\"an-object\"</ETag>\
                         <LastModified>2026-11-27T12:00:00.000Z</LastModified></Contents>",
                        bytes.len()
                    ));
                }
                body.push_str("</ListBucketResult>");
                answer(to, "200 OK", &[], body.as_bytes(), true)
            }
            "GET" | "HEAD" => match (objects.get(&key), request.range) {
                (None, _) => no(to, "404 Not Found", "NoSuchKey"),
                (Some(bytes), None) => {
                    answer(to, "200 OK", &OBJECT, bytes, request.method == "GET")
                }
                (Some(bytes), Some((first, last))) => {
                    let last = last.min(bytes.len() - 1);
                    let of = format!("Content-Range: bytes {first}-{last}/{}", bytes.len());
                    let headers = [OBJECT[0], OBJECT[1], &of];
                    answer(
                        to,
                        "206 Partial Content",
                        &headers,
                        &bytes[first..=last],
                        true,
                    )
                }
            },
            _ => no(to, "405 Method Not Allowed", "MethodNotAllowed"),
        }
    }
}
