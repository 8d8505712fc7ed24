//! The address of an archive.

use std::path::PathBuf;
use std::str::FromStr;

use crate::error::{Error, ErrorKind};

/// Where an archive is, from text such as `s3://bucket/prefix?endpoint=http://host:9000` or
/// `file:///srv/archive`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveUrl {
    text: String,
    pub(crate) place: StorePlace,
    /// Whether the store must refuse to create an object twice.
    pub(crate) fencing: bool,
}

/// A store, and where in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StorePlace {
    Directory(PathBuf),
    S3 {
        bucket: String,
        prefix: String,
        endpoint: Option<String>,
        region: Option<String>,
        /// Whether the bucket's name is part of the host's.
        virtual_host: bool,
    },
}

impl ArchiveUrl {
    /// The directory, if the archive is in one.
    pub fn directory(&self) -> Option<&std::path::Path> {
        match &self.place {
            StorePlace::Directory(directory) => Some(directory),
            StorePlace::S3 { .. } => None,
        }
    }

    /// Whether the name of a server has to be looked up.
    pub fn looks_up_names(&self) -> bool {
        let StorePlace::S3 {
            endpoint,
            virtual_host,
            ..
        } = &self.place
        else {
            return false;
        };
        let server = endpoint.as_ref().and_then(|url| {
            let (_, rest) = url.split_once("://")?;
            let server = rest.split('/').next()?;
            let is_address = server.parse::<std::net::SocketAddr>().is_ok();
            let host = server.trim_matches(['[', ']']);
            Some(is_address || host.parse::<std::net::IpAddr>().is_ok())
        });
        *virtual_host || server != Some(true)
    }

    /// The file with keys for the store that is read where the environment has none.
    pub fn keys_file() -> Option<PathBuf> {
        let file = std::env::var_os("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from);
        let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".aws/credentials"));
        file.or_else(home)
    }

    /// What the command line takes, for people.
    pub const FORMS: &str = "s3://BUCKET/PREFIX, with ?endpoint=URL, ?region=NAME and others \
                             behind it where needed, or file:///DIRECTORY";
}

const NO_KEYS: &str = "keys don't belong here: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in \
                       the environment";

fn invalid(text: &str, why: &str) -> Error {
    let forms = ArchiveUrl::FORMS;
    // The text may have what should not be shown, where a password was put into it.
    let shown = text.split('?').next().unwrap_or_default();
    let shown = shown.rsplit('@').next().unwrap_or_default();
    Error::new(
        ErrorKind::InvalidInput,
        format!("'{shown}' is not the address of an archive: {why}; give {forms}"),
    )
}

impl FromStr for ArchiveUrl {
    type Err = Error;

    /// # Errors
    /// [`ErrorKind::InvalidInput`] if it is not an address of an archive.
    fn from_str(text: &str) -> Result<Self, Error> {
        let invalid = |why: &str| invalid(text, why);
        let (path, query) = text.split_once('?').unwrap_or((text, ""));
        let (mut endpoint, mut region) = (None, None);
        let (mut fencing, mut virtual_host) = (true, false);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let on = |value: &str| match value {
                "on" => Ok(true),
                "off" => Ok(false),
                _ => Err(invalid(&format!("{pair}: on or off"))),
            };
            match pair.split_once('=') {
                Some(("endpoint", value)) => endpoint = Some(value.to_owned()),
                Some(("region", value)) => region = Some(value.to_owned()),
                Some(("fencing", value)) => fencing = on(value)?,
                Some(("virtual-host", value)) => virtual_host = on(value)?,
                _ => {
                    return Err(invalid(
                        "after the question mark, only endpoint=, region=, virtual-host= and \
                         fencing= are known",
                    ));
                }
            }
        }
        let place = if let Some(directory) = path.strip_prefix("file://") {
            if !directory.starts_with('/') {
                return Err(invalid(
                    "a directory begins with a slash: file:///srv/archive",
                ));
            } else if endpoint.is_some() || region.is_some() || virtual_host {
                return Err(invalid("a directory has no endpoint and no region"));
            }
            StorePlace::Directory(directory.into())
        } else if let Some(path) = path.strip_prefix("s3://") {
            let (bucket, prefix) = path.split_once('/').unwrap_or((path, ""));
            if bucket.is_empty() {
                return Err(invalid("the bucket is missing"));
            } else if bucket.contains(['@', ':']) {
                return Err(invalid(NO_KEYS));
            }
            let known = |url: &String| url.starts_with("http://") || url.starts_with("https://");
            if !endpoint.as_ref().is_none_or(known) {
                return Err(invalid("an endpoint begins with http:// or https://"));
            } else if endpoint.as_ref().is_some_and(|url| url.contains('@')) {
                return Err(invalid(NO_KEYS));
            } else if endpoint
                .as_ref()
                .is_some_and(|url| url.contains(['?', '#']))
            {
                return Err(invalid("an endpoint has no question mark and no #"));
            }
            StorePlace::S3 {
                bucket: bucket.to_owned(),
                prefix: prefix.trim_matches('/').to_owned(),
                endpoint,
                region,
                virtual_host,
            }
        } else {
            return Err(invalid("it begins with s3:// or file://"));
        };
        Ok(Self {
            text: text.to_owned(),
            place,
            fencing,
        })
    }
}

impl std::fmt::Display for ArchiveUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        text.parse::<ArchiveUrl>().unwrap_err().to_string()
    }

    #[test]
    fn addresses_name_a_store_and_a_place() {
        let url: ArchiveUrl = "s3://b/a/log/?endpoint=http://h:9000&region=eu&fencing=off"
            .parse()
            .unwrap();
        assert!(!url.fencing);
        let place = StorePlace::S3 {
            bucket: "b".into(),
            prefix: "a/log".into(),
            endpoint: Some("http://h:9000".into()),
            region: Some("eu".into()),
            virtual_host: false,
        };
        assert_eq!(url.place, place);
        let url: ArchiveUrl = "file:///srv/a".parse().unwrap();
        assert_eq!(url.place, StorePlace::Directory("/srv/a".into()));
        assert!(url.fencing);
    }

    #[test]
    fn the_address_of_a_server_needs_no_look_up() {
        for (text, looks_up) in [
            ("file:///srv/a", false),
            ("s3://b/a", true),
            ("s3://b/a?endpoint=http://store:9000", true),
            ("s3://b/a?endpoint=http://10.0.0.1:9000", false),
            ("s3://b/a?endpoint=https://[fd00::1]:9000/x", false),
            ("s3://b/a?endpoint=https://10.0.0.1", false),
            (
                "s3://b/a?endpoint=http://10.0.0.1:9000&virtual-host=on",
                true,
            ),
        ] {
            let url: ArchiveUrl = text.parse().unwrap();
            assert_eq!(url.looks_up_names(), looks_up, "{text}");
        }
    }

    #[test]
    fn what_is_no_address_is_refused_and_keys_are_not_repeated() {
        assert!(error("http://b/a").contains("s3:// or file://"));
        assert!(error("s3:///a").contains("bucket is missing"));
        assert!(error("file://srv").contains("begins with a slash"));
        assert!(error("s3://b?endpoint=h").contains("http://"));
        let error = error("s3://key:secret@b/a");
        assert!(
            error.contains("AWS_ACCESS_KEY_ID") && !error.contains("secret"),
            "{error}"
        );
        for text in [
            "s3://b/a?secret=hidden",
            "s3://b/a?endpoint=https://key:hidden@store",
            "s3://b/a?endpoint=http://h:9000/?X-Amz-Signature=hidden",
            "s3://b/a?endpoint=http://h:9000/%3Fx?hidden&region=eu",
            "s3://b/a?endpoint=http://h:9000#hidden",
        ] {
            let error = self::error(text);
            assert!(!error.contains("hidden"), "{error}");
        }
    }
}
