//! The client of the public API: its channel, TLS, and the API key.

use std::path::Path;
use std::time::Duration;

use penstock_protos::SERVICE_CONFIG;
use penstock_protos::inference::v1::inference_service_client::InferenceServiceClient;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};
use tonic::{Request, Status};

use crate::channel::{Channel, ServiceConfig};
use crate::command_line::Options;
use crate::errors::Failure;

pub type Client = InferenceServiceClient<InterceptedService<Channel, Key>>;

/// tonic's default, 4 MiB, is too small for long log-probabilities.
const MAX_MESSAGE_BYTES: usize = 64 * 1024 * 1024;
/// Time limit for opening a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Returns the client of the program. Clones of the client share its connections.
pub fn connect(options: &Options) -> Result<Client, Failure> {
    let config = ServiceConfig::parse(SERVICE_CONFIG).expect("the package's own is right");
    let channel = Channel::new(options.address.clone(), endpoint(options)?, config);
    Ok(InferenceServiceClient::with_interceptor(channel, Key::from_environment()?)
        .max_decoding_message_size(MAX_MESSAGE_BYTES))
}

fn endpoint(options: &Options) -> Result<Endpoint, Failure> {
    let encrypted = options.tls || options.ca.is_some();
    let scheme = if encrypted { "https" } else { "http" };
    let endpoint = Endpoint::from_shared(format!("{scheme}://{}", options.address.as_str()))?
        .connect_timeout(CONNECT_TIMEOUT)
        // Detect a broken connection after 40 s, even in a stream without messages.
        .http2_keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(10));
    if !encrypted {
        return Ok(endpoint);
    }
    let tls = match &options.ca {
        Some(file) => ClientTlsConfig::new().ca_certificate(certificates(file)?),
        None => ClientTlsConfig::new().with_native_roots(),
    };
    Ok(endpoint.tls_config(tls)?)
}

/// Reads the certificates to trust. Returns an error if the file has none, because tonic would silently trust no
/// server.
fn certificates(file: &Path) -> Result<Certificate, Failure> {
    match std::fs::read_to_string(file) {
        Ok(pem) if pem.contains("-----BEGIN CERTIFICATE-----") => Ok(Certificate::from_pem(pem)),
        Ok(_) => Err(Failure::Told(format!("--ca {}: there is no certificate in it", file.display()))),
        Err(error) => Err(Failure::Told(format!("--ca {}: {error}", file.display()))),
    }
}

/// Adds the API key to the metadata of every call.
#[derive(Clone)]
pub struct Key(Option<MetadataValue<Ascii>>);

impl Key {
    fn from_environment() -> Result<Self, Failure> {
        let key = std::env::var("PENSTOCK_API_KEY").ok().filter(|key| !key.is_empty());
        let value = key.map(|key| format!("Bearer {key}").parse()).transpose();
        value.map(Self).map_err(|_| Failure::Told("PENSTOCK_API_KEY has characters that no metadata may have".into()))
    }
}

impl Interceptor for Key {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(key) = &self.0 {
            request.metadata_mut().insert("authorization", key.clone());
        }
        Ok(request)
    }
}
