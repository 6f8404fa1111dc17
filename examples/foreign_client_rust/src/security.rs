//! TLS under the protocol, and the settings of TLS and of the login, from the variables that all clients read.

use crate::wire::Result;
use rustls::client::WebPkiServerVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

pub trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

pub struct Login {
    pub user: String,
    pub password: String,
}

pub struct Security {
    tls: Option<Arc<ClientConfig>>,
    pub login: Option<Login>,
}

fn setting(name: &str) -> Option<String> {
    let variable = format!("KAFKALITE_CLIENT_{}", name.to_uppercase().replace('.', "_"));
    std::env::var(variable).ok().filter(|text| !text.is_empty())
}

fn required(name: &str) -> Result<String> {
    setting(name).ok_or(format!("{name} is not set"))
}

impl Security {
    /// Read `security.protocol` and what it needs. Secrets are in variables, which no list of processes shows.
    pub fn from_environment() -> Result<Self> {
        let protocol = setting("security.protocol").unwrap_or("PLAINTEXT".into());
        let (has_tls, has_login) = match protocol.as_str() {
            "PLAINTEXT" => (false, false),
            "SSL" => (true, false),
            "SASL_PLAINTEXT" => (false, true),
            "SASL_SSL" => (true, true),
            other => return Err(format!("security.protocol is {other}, and not one of Kafka's")),
        };
        let login = match has_login {
            true => Some(Login { user: required("sasl.username")?, password: required("sasl.password")? }),
            false => None,
        };
        Ok(Security { tls: if has_tls { Some(Arc::new(config()?)) } else { None }, login })
    }

    /// Encrypt a connection, if TLS is set, with a complete handshake.
    pub fn wrap(&self, mut stream: TcpStream, address: &str) -> Result<Box<dyn Stream>> {
        let Some(config) = &self.tls else { return Ok(Box::new(stream)) };
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_matches(['[', ']']).to_string();
        let name = ServerName::try_from(host).map_err(|error| format!("{address}: {error}"))?;
        let mut tls = ClientConnection::new(config.clone(), name).map_err(|error| error.to_string())?;
        while tls.is_handshaking() {
            tls.complete_io(&mut stream).map_err(|error| format!("{address}: {}", explain(&error)))?;
        }
        Ok(Box::new(StreamOwned::new(tls, stream)))
    }
}

/// Return the config of TLS: the authorities to trust, and this client's certificate if it has one. Host names
/// are always checked.
fn config() -> Result<ClientConfig> {
    let path = required("ssl.truststore.location")?;
    let mut roots = RootCertStore::empty();
    for certificate in certificates("ssl.truststore.location", &path)? {
        roots.add(certificate).map_err(|error| format!("ssl.truststore.location {path}: {error}"))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_webpki_verifier(verifier.build().map_err(|error| format!("ssl.truststore.location {path}: {error}"))?);
    let Some(path) = setting("ssl.keystore.location") else { return Ok(builder.with_no_client_auth()) };
    let chain = certificates("ssl.keystore.location", &path)?;
    let key = PrivateKeyDer::from_pem_file(&path);
    let key = key.map_err(|error| format!("ssl.keystore.location {path}: no private key: {error}"))?;
    builder.with_client_auth_cert(chain, key).map_err(|error| format!("ssl.keystore.location {path}: {error}"))
}

fn certificates(name: &str, path: &str) -> Result<Vec<CertificateDer<'static>>> {
    let found = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>);
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(format!("{name} {path}: no certificate")),
        Err(error) => Err(format!("{name} {path}: {error}")),
    }
}

/// Return the reason of an error of a stream in words: which side refused the other, and why.
pub fn explain(error: &io::Error) -> String {
    use rustls::{CertificateError, Error};
    let Some(reason) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) else {
        return match error.kind() {
            io::ErrorKind::UnexpectedEof => "the server closed the connection".into(),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "the server did not respond in time".into(),
            _ => error.to_string(),
        };
    };
    match reason {
        Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
            "the server's certificate is refused: its issuer is not trusted (check ssl.truststore.location)".into()
        }
        Error::InvalidCertificate(why) => format!("the server's certificate is refused: {why}"),
        Error::AlertReceived(alert) => format!("the server refuses this client: {alert:?}"),
        Error::InvalidMessage(_) => "the server does not speak TLS (check security.protocol)".into(),
        other => format!("TLS failed: {other}"),
    }
}
