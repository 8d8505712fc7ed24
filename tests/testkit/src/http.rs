//! Requests of HTTP, one for each connection.

use std::io::{self, Read, Write};

/// What a server answers to a request, until it closes the connection.
///
/// # Errors
/// The connection fails, or the answer is not UTF-8.
pub fn ask(mut stream: impl Read + Write, request: &str) -> io::Result<String> {
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// The body at a path of a server.
///
/// # Errors
/// As [`ask`], or the server has nothing there: the error is its answer.
pub fn get(stream: impl Read + Write, path: &str) -> io::Result<String> {
    // Of HTTP/1.0: the answer has no chunks.
    let answer = ask(stream, &format!("GET {path} HTTP/1.0\r\n\r\n"))?;
    match answer.split_once("\r\n\r\n") {
        Some((head, body)) if head.contains(" 200 OK") => Ok(body.to_owned()),
        _ => Err(io::Error::other(answer)),
    }
}
